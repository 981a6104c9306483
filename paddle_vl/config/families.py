"""The registry of model families: model types, settings class, recipe and capabilities of each.

Classes and functions are named as "module:name" and imported on first use, so that reading a run's
settings loads neither Paddle nor the other families, and a command loads what it asks for. A family
outside of the package registers itself with one call of `register_family`.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from paddle_vl.files.text_file import read_json_object


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder that the parallel plan divides over ranks.

    Attributes:
        moe_intermediate_size: inner width of an expert; 0 without experts.
        num_experts: experts of a layer; 0 without experts.
        shared_expert_intermediate_size: inner width of an expert of all tokens; 0 without one.
        linear_num_key_heads: key heads of layers with a state in place of keys; 0 without such.
        table_rows: rows of each table that is divided by rows.
    """

    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    intermediate_size: int
    num_hidden_layers: int
    moe_intermediate_size: int = 0
    num_experts: int = 0
    shared_expert_intermediate_size: int = 0
    linear_num_key_heads: int = 0
    table_rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class EncoderShape:
    """Sizes of an encoder that tensor parallelism divides, under `schedule: colocated`.

    Attributes:
        widths: by the name of the setting in the model's configuration.
    """

    widths: dict[str, int]


@dataclass(frozen=True)
class FamilyEntry:
    """A registered model family.

    Attributes:
        name: for errors and help texts.
        model_types: values of `model_type` (HF) or `type` (LeRobot) in a config.json of the family.
        settings: "module:Class" of its run settings, a `paddle_vl.config.schema.RunConfig`.
        recipe: "module:Class" of its `paddle_vl.families.base.Family`.
        model: "module:Class" of what commands open with `from_pretrained`.
        capabilities: "module:function" of each that the family has, see `ask`.
        refusals: what is told where it has none, in place of `_REFUSALS`.
        sizes: how the names of its published sizes begin, in small letters; not needed of the
            first family.
        processor: "module:Class" of its processor, by HF's name; not needed of a policy.
    """

    name: str
    model_types: tuple[str, ...]
    settings: str
    recipe: str
    model: str = ""
    capabilities: Mapping[str, str] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    processor: str = ""

    def settings_class(self) -> Any:
        return _loaded(self.settings)

    def recipe_class(self) -> Any:
        return _loaded(self.recipe)

    def model_class(self) -> Any:
        return _loaded(self.model)

    def ask(self, what: str, *given: Any) -> Any:
        """What a capability answers, whose function gets this entry and what is given:

        chat(folder, base, template_variables, dtype="float32"): the model of `paddle-vl generate`.
            Its `stream(messages, images, videos, **settings)` is the answer to the last message in
            pieces. That of `chat` is `vlm.answering.chat.Answers`.
        act(folder): a `paddle_vl.families.policy.acting.ActingPolicy`.
        evaluate(folder, options): model, data and report, a `paddle_vl.families.base.Evaluation`.
        export(folder, base): a `paddle_vl.export.writing.ModelToExport` of a model folder, or of
            adapters merged into their base.
        merge(folder, out, base): the folder of the base, after base and adapters are written as one
            model folder.
        check_folder(folder, base, engine): whether an engine serves a folder, or adapters with the
            folder of their base, as it was trained, and the lines that tell of it.
        precompute_reference(config): the files with the log-probabilities of a run's reference.
        synthetic_data(config, folder, num_samples, shapes): the run with as many made-up samples,
            its files in the folder. The shapes are `cameras`, `image_side` in pixels and
            `answer_tokens`, as far as they are given.
        cameras(config, num_cameras): the run on its own data with that many cameras.
        shown_samples(config, of_eval, first, count): `paddle_vl.data.shown_sample.ShownSample`s of
            data.train, or of data.eval, from a number on.
        questions(recipe, model, collator): those of the evaluation data that a run answers, with
            the methods of `paddle_vl.families.vlm.answering.questions.VLQuestions`; None without
            train.eval.

        Raises:
            ValueError: the family does not have the capability, or not with these values.
        """
        return self.capability(what, *given)(self, *given)

    def capability(self, what: str, *given: Any) -> Any:
        """The function of a capability; or under `exported` the class that runs the family's
        exported programs, see `paddle_vl.export`.

        Raises:
            ValueError: the family does not have it.
        """
        if what not in self.capabilities:
            told = self.refusals.get(what) or _REFUSALS.get(what, "a {family} has no " + what)
            raise ValueError(told.format(*given, family=self.name))
        return _loaded(self.capabilities[what])


_CANNOT_EXPORT = "models of the family {family} cannot be exported"
# By capability; the numbers are those of what is given.
_REFUSALS = {
    "chat": "the model in {0} is of a family that does not answer questions",
    "act": "the model in {0} does not act: give the folder of a robot policy",
    "export": f"{_CANNOT_EXPORT} yet",
    "exported": f"{_CANNOT_EXPORT} yet",
    "merge": "the model in {0} is of a family without adapters",
    "precompute_reference": "a {family} does not compare answers: there is no reference",
    "synthetic_data": "the model's family makes no synthetic data: leave --synthetic out",
    "cameras": "--cameras {1}: the run's data have the images that they have; --synthetic makes "
    "samples with that many",
    "shown_samples": "show-data shows conversations and documents, which this family has not",
}
_FAMILIES: list[FamilyEntry] = []


def register_family(entry: FamilyEntry) -> None:
    """Add a family; every command knows it from then on.

    Raises:
        ValueError: one of its model types belongs to another family.
    """
    for other in _FAMILIES:
        if taken := set(entry.model_types) & set(other.model_types):
            raise ValueError(
                f"model type {', '.join(sorted(taken))} of family {entry.name} is registered for "
                f"family {other.name}: choose another type"
            )
    _FAMILIES.append(entry)


def families() -> tuple[FamilyEntry, ...]:
    """All families, in the order of registration."""
    return tuple(_FAMILIES)


def family_of(model_values: dict[str, Any]) -> FamilyEntry:
    """The family of a model by its config.json; the first family where nothing names a type.

    Args:
        model_values: content of config.json; empty where it cannot be read.

    Raises:
        ValueError: no family has the model type.
    """
    named = [model_values.get(key) for key in ("type", "model_type")]
    named = [name for name in named if name and isinstance(name, str)]
    for entry in _FAMILIES:
        if any(model_type in entry.model_types for model_type in named):
            return entry
    for entry in _FAMILIES if named else ():
        if named[0] in entry.settings_class().backbones:
            raise ValueError(
                f"{named[0]} is the backbone of a {entry.name}, not a whole one: to start a run "
                "from it, describe the policy in model.config beside model.pretrained"
            )
    if named:
        known = ", ".join(each for entry in _FAMILIES for each in entry.model_types)
        raise ValueError(
            f"the model type {str(named[0])!r:.100} belongs to no family of this package, which "
            f"has {known}: correct model.config, or its config.json, or register its family"
        )
    return _FAMILIES[0]


def family_of_folder(folder: Path) -> FamilyEntry:
    """The family of a model folder; of adapters, which have no config.json, give the base's."""
    return family_of(model_values(folder))


def family_of_run(config: Any, checkpoint: Path | None = None) -> FamilyEntry:
    """The family that a run trains.

    Args:
        config: a `RunConfig`.
        checkpoint: to resume from; its config.json takes precedence.

    Raises:
        ValueError, RuntimeError: the settings are those of another family; or the model's
            config.json cannot be read, so that only the settings say which family it is of.
    """
    model = config.model
    # Beside model.config, model.pretrained is a backbone.
    source = model.pretrained if model.config is None else model.config
    entry = family_of((checkpoint and model_values(checkpoint)) or model_values(source))
    if not isinstance(config, entry.settings_class()):
        if isinstance(source, str):
            file = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
            read_json_object(file, "a model's configuration")
        raise ValueError(
            f"the model is of the family {entry.name}, but the settings are those of "
            f"{config.family}: check model.pretrained or model.config ({source!r:.200})"
        )
    return entry


def model_values(source: str | Path | dict[str, Any] | None) -> dict[str, Any]:
    """The content of a model's config.json; empty if it cannot be read (the family reports that).
    Of a published size only the model type.

    Args:
        source: a model folder, a config.json, its content, or the name of a published size.
    """
    if isinstance(source, dict) or source is None:
        return source or {}
    file, name = Path(source), str(source).lower()
    for owner in ("qwen/", "paddlepaddle/"):
        name = name.removeprefix(owner)
    # The longest beginning tells apart families with one generation in their names.
    begins = {begin: entry for entry in _FAMILIES for begin in entry.sizes}
    of_size = max((begin for begin in begins if name.startswith(begin)), key=len, default=None)
    try:
        file = file / "config.json" if file.is_dir() else file
        # Opening a pipe would block.
        if of_size and not file.exists():
            return {"model_type": begins[of_size].model_types[0]}
        return read_json_object(file, "a config.json") if file.is_file() else {}
    except (OSError, RuntimeError):
        return {}


def processor_class(folder: Path, model_type: str | None = None) -> Any:
    """The class of a folder's processor, by the `processor_class` of its files, else by the type of
    its model; of no family's the first's.

    Args:
        model_type: of the model; None for that of the folder's config.json.
    """
    own = [entry for entry in _FAMILIES if entry.processor]
    by_name = {entry.processor.partition(":")[2]: entry.processor for entry in own}
    for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        # What cannot be read is told by who needs it.
        with suppress(OSError, RuntimeError):
            values = read_json_object(folder / file, "a processor's file")
            if (name := values.get("processor_class")) in by_name:
                return _loaded(by_name[name])
    model_type = model_type or model_values(folder).get("model_type")
    found = [entry.processor for entry in own if model_type in entry.model_types]
    return _loaded((found or [own[0].processor])[0])


def _loaded(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


_VLM = "paddle_vl.families.vlm"
VLM_CAPABILITIES = {
    "chat": f"{_VLM}.answering.chat:open_chat",
    "evaluate": f"{_VLM}.evaluation.scorer:build_evaluation",
    "merge": f"{_VLM}.training.adapter:merge_with_processor",
    "check_folder": f"{_VLM}.folders.folder_check:check_folder",
    "precompute_reference": f"{_VLM}.preference.answers:precompute_reference",
    "synthetic_data": f"{_VLM}.inputs.synthetic:with_synthetic_data",
    "shown_samples": f"{_VLM}.training.shown_samples:shown_samples",
    "questions": f"{_VLM}.answering.questions:asked_questions",
}
_EXPORTED_VL = {
    "export": "paddle_vl.export.qwen3_vl.programs:to_export",
    "exported": "paddle_vl.export.qwen3_vl.exported:ExportedQwen3VL",
}
_STATES = (
    f"{_CANNOT_EXPORT}: the number of chunks that its states pass through depends on the length of "
    "a prompt, which a traced program does not know; generate with the model itself"
)
_OCR = "paddle_vl.families.paddleocr_vl"
_PI07, _PI07_EXPORT = "paddle_vl.families.pi07", "paddle_vl.export.pi07"
_OF_BOTH_POLICIES = {
    "evaluate": f"{_PI07}.recipe:build_evaluation",
    "export": f"{_PI07_EXPORT}.programs:to_export",
    "merge": f"{_PI07}.policy:merge_adapter",
    "synthetic_data": f"{_PI07}.workload:with_synthetic_data",
    "cameras": f"{_PI07}.workload:with_cameras",
}
_ANSWERS_NOTHING = (
    "{0} is a pi07 policy, which acts and answers no questions: its losses on demonstrations are "
    "told by `paddle-vl evaluate`, its actions by select_action of "
    "paddle_vl.PI07LowLevelPolicy.from_pretrained(...), the planner's texts by "
    "paddle_vl.PI07HighLevelPlanner"
)
for _entry in (
    FamilyEntry(
        "Qwen3-VL",
        ("qwen3_vl", "qwen3_vl_moe"),
        f"{_VLM}.settings:VLRun",
        "paddle_vl.families.qwen3_vl.recipe:Qwen3VLRecipe",
        "paddle_vl.families.qwen3_vl.model:Qwen3VLForConditionalGeneration",
        VLM_CAPABILITIES | _EXPORTED_VL,
        processor=f"{_VLM}.inputs.processor:Qwen3VLProcessor",
    ),
    FamilyEntry(
        "Qwen3.5",
        ("qwen3_5", "qwen3_5_moe"),
        f"{_VLM}.settings:VLRun",
        "paddle_vl.families.qwen3_5.recipe:Qwen3_5Recipe",
        "paddle_vl.families.qwen3_5.model:Qwen3_5ForConditionalGeneration",
        VLM_CAPABILITIES,
        {"export": _STATES},
        sizes=("qwen3.5-", "qwen3.6-", "qwen3.8-"),
        processor=f"{_VLM}.inputs.processor:Qwen3VLProcessor",
    ),
    FamilyEntry(
        "Qwen4-Exp",
        ("qwen4_exp", "qwen3_8_flash_next"),
        f"{_VLM}.settings:VLRun",
        "paddle_vl.families.qwen4_exp.recipe:Qwen4ExpRecipe",
        "paddle_vl.families.qwen4_exp.model:Qwen4ExpForConditionalGeneration",
        VLM_CAPABILITIES,
        {"export": _STATES},
        sizes=("qwen3.8-flash-next",),
        processor=f"{_VLM}.inputs.processor:Qwen3VLProcessor",
    ),
    FamilyEntry(
        "PaddleOCR-VL",
        ("paddleocr_vl",),
        f"{_OCR}.settings:PaddleOCRVLRun",
        f"{_OCR}.recipe:PaddleOCRVLRecipe",
        f"{_OCR}.model:PaddleOCRVLForConditionalGeneration",
        VLM_CAPABILITIES | _EXPORTED_VL | {"check_folder": f"{_OCR}.folder_check:check_folder"},
        sizes=("paddleocr-vl",),
        processor=f"{_OCR}.inputs.processor:PaddleOCRVLProcessor",
    ),
    FamilyEntry(
        "pi07 policy",
        ("pi07_low_level",),
        f"{_PI07}.settings:PI07Run",
        f"{_PI07}.recipe:PI07Recipe",
        f"{_PI07}.policy:PI07LowLevelPolicy",
        _OF_BOTH_POLICIES
        | {
            "act": f"{_PI07}.policy:open_policy",
            "exported": f"{_PI07_EXPORT}.exported:ExportedPI07Policy",
        },
        {"chat": _ANSWERS_NOTHING},
    ),
    FamilyEntry(
        "pi07 planner",
        ("pi07_high_level",),
        f"{_PI07}.settings:PI07Run",
        f"{_PI07}.recipe:PI07PlannerRecipe",
        f"{_PI07}.planner:PI07HighLevelPlanner",
        _OF_BOTH_POLICIES | {"exported": f"{_PI07_EXPORT}.exported:ExportedPI07Planner"},
        {
            "chat": _ANSWERS_NOTHING,
            "act": "{0} is a pi07 planner, which does not act: give its policy",
        },
    ),
):
    register_family(_entry)
