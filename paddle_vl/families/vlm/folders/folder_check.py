"""Whether an engine serves a model folder as it was trained: its tensors, settings and files
against the rules of `paddle_vl.families.vlm.answering.engines`.

Reads JSON files and the headers of safetensors, no weights.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import paddle

from paddle_vl.checkpoint.adapter_files import StoredAdapter
from paddle_vl.checkpoint.reading import ReadableTensor, checkpoint_tensors
from paddle_vl.checkpoint.safetensors_io import FLOATING, JoinedRows
from paddle_vl.config.families import FamilyEntry, processor_class
from paddle_vl.families.vlm.answering.engines import ENGINES, EngineRules, Finding
from paddle_vl.families.vlm.folders.processor_fit import check_processor_fits
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.inputs.video_processor import VideoProcessor
from paddle_vl.families.vlm.modeling.config import HEAD_KEY
from paddle_vl.families.vlm.templates.template_files import (
    NESTED_CONFIG_FILE,
    read_folder_templates,
    stored_templates,
)
from paddle_vl.families.vlm.training.adapter import with_head
from paddle_vl.files.text_file import read_json_object, shown
from paddle_vl.generation.config import FILE_NAME

Found = Iterator[tuple[Finding, str]]
# By `is_swapped`, which stacks of single tensors do not have.
_LAYOUTS = {False: "published", True: "swapped", None: "one by one"}
_TIES = ("tie_word_embeddings", "text_config.tie_word_embeddings")
_HUBS = {"shortest_edge": 65536, "longest_edge": 16777216}
_TURNED = ("qwen3_vl_moe", "published")
_NAMES_IN_A_LINE = 3


def check_folder(
    family: FamilyEntry, folder: Path, base: Path, engine: str
) -> tuple[bool, list[str]]:
    """See `FamilyEntry.ask`."""
    if (rules := ENGINES.get(engine)) is None:
        return False, [f"{Finding.REFUSED.value}: {engine} has no models of this family"]
    return told(_found(family.model_class(), folder, base, rules), rules)


def told(findings: Found, engine: EngineRules) -> tuple[bool, list[str]]:
    """Whether the engine serves the folder, and the lines that tell of it."""
    found = list(findings)
    faults = {kind for kind, _ in found} - {Finding.IGNORED, Finding.NOTE}
    verdict = "does not fit" if faults else "fits"
    if faults == {Finding.UNCHECKED}:
        verdict = "was not compared in full with"
    last = f"{verdict} the rules of {engine.sources}"
    return not faults, [*(f"{kind.value}: {text}" for kind, text in found), last]


def _found(model_class: Any, folder: Path, base: Path, engine: EngineRules) -> Found:
    values = read_json_object(base / "config.json", "a model's configuration")
    if (model_type := str(values.get("model_type"))) not in engine.models:
        yield Finding.REFUSED, f"it serves {', '.join(engine.models)}, not {model_type}"
        return
    yield from setting_findings(values, engine, model_type)
    try:
        yield from (files := list(file_findings(base, engine)))
        config = model_class.config_class.from_dict(values)
        expected, given = config.to_dict()["architectures"], values.get("architectures")
        if given != expected:
            yield Finding.REFUSED, f"config.json: architectures is {shown(given)}, not {expected}"
        names = model_class.checkpoint_map
        as_here = names.tensors_as_here
        stored = as_here(checkpoint_tensors(base), config)
        if (constant_keys := getattr(names, "constant_keys", None)) is not None:
            stored = {k: v for k, v in stored.items() if k not in constant_keys(config)}
        is_tied = any(_value(values, key) for key in _TIES)
        with paddle.LazyGuard():
            wanted = model_class(config.with_tie(is_tied)).whole_shapes()
        if is_tied and stored.pop(HEAD_KEY, None):
            yield Finding.IGNORED, f"{HEAD_KEY}: the embedding is the head"
        yield from tensor_findings(wanted, stored, engine, model_type)
        parts = _value(values, "text_config.split_ngram_parts")
        yield from table_findings(stored, parts or 512, engine)
        if Finding.MISSING not in dict(files):
            yield from refusal(check_processor_fits, config, VLProcessor.from_pretrained(base))
        if folder != base:
            adapter = StoredAdapter.read(folder, getattr(names, "key_here", str))
            adapter.tensors.update(as_here(adapter.tensors, config))
            on_base = with_head(adapter, stored, config.embedding_key) if is_tied else stored
            yield from refusal(adapter.merged, on_base)
            yield from adapter_findings(adapter, engine, model_type)
    except RuntimeError as error:
        # Of a file that is missing or damaged.
        yield Finding.REFUSED, str(error)
    except ValueError as error:
        # Of what this package does not have, such as quantized weights.
        yield Finding.UNCHECKED, f"not read here: {error}"


def refusal(check: Callable[..., object], *things: Any) -> Found:
    """What does not fit together, for any program."""
    try:
        check(*things)
    except ValueError as error:
        yield Finding.REFUSED, str(error)


def adapter_findings(adapter: StoredAdapter, engine: EngineRules, model_type: str) -> Found:
    settings, sizes = adapter.config, set(adapter.sizes.values())
    has = {
        "DoRA": settings.use_dora,
        "rsLoRA": settings.use_rslora,
        "ranks or alphas by module": sizes != {(settings.r, settings.lora_alpha)},
        "modules_to_save": adapter.modules_to_save,
        "adapters of the tower": any(m.startswith("model.visual.") for m in adapter.sizes),
    }
    unfit = [each for each, is_used in has.items() if is_used and each not in engine.features]
    if model_type not in engine.adapted:
        unfit = [f"adapters of {model_type}"]
    if unfit:
        yield engine.unfit, f"no {' and '.join(unfit)}: merge them with paddle-vl merge"
    if (rank := max(size.r for size in sizes)) > engine.max_rank > 0:
        yield Finding.NOTE, f"rank {rank} needs --max-lora-rank {rank}"
    if has["adapters of the tower"] and engine.max_rank:
        yield Finding.NOTE, "adapters of the tower need --enable-tower-connector-lora"


def setting_findings(values: Mapping[str, Any], engine: EngineRules, model_type: str) -> Found:
    for *having, keys in (entry.split() for entry in engine.settings):
        is_read = all(fnmatchcase(model_type, pattern) for pattern in having)
        names = keys.split("|")[: 1 if engine.reads_older_keys else None]
        if is_read and all(_value(values, name) is None for name in names):
            told = f"config.json: no {' or '.join(names)}"
            yield Finding.LOST, f"{told}: the engine takes a default of its own, or ends"
    top, text = (_value(values, key) for key in _TIES)
    if bool(top) != bool(text):
        told = f"tie_word_embeddings is {shown(top)}, in text_config {shown(text)}"
        yield Finding.LOST, f"config.json: {told}: engines differ in which they read, set both"
    text = _value(values, "text_config") or {}
    if model_type == "qwen4_exp":
        yield from _attention_findings(text, engine)
    if engine.reads_older_keys:
        keys = sorted({"torch_dtype", "dtype"} & {*values, *values.get("text_config", ())})
        if keys != ["torch_dtype"] and (keys != ["dtype"] or "transformers_version" not in values):
            told = f"config.json: {' and '.join(keys) or 'no torch_dtype'}"
            yield Finding.REFUSED, f"{told}: torch_dtype alone is the sign of HF's layout"


def _attention_findings(text: Mapping[str, Any], engine: EngineRules) -> Found:
    unknown = sorted(set(text.get("layer_types") or ()) - set(engine.layers))
    if engine.layers and unknown:
        told = f"layer_types has {', '.join(map(str, unknown))}, not {' or '.join(engine.layers)}"
        yield Finding.REFUSED, f"config.json: {told}: save it again with this package"
    budget, size = (text.get(f"indexer_{name}") for name in ("budget", "compress_ratio"))
    if engine.blocks and budget and size and budget // size not in engine.blocks:
        told = f"{budget // size}, not {' or '.join(map(str, engine.blocks))}"
        yield Finding.REFUSED, f"config.json: indexer_budget / indexer_compress_ratio is {told}"


def table_findings(stored: Mapping[str, Any], count: int, engine: EngineRules) -> Found:
    for name, tensor in stored.items() if engine.places_parts else ():
        if not name.endswith(".ngram_embedding.weight"):
            continue
        if not isinstance(tensor, JoinedRows):
            yield Finding.REFUSED, f"{name} is one tensor, not parts: save it with this package"
        elif {part.shape[0] for part in tensor.parts[:-1]} - {-(-tensor.shape[0] // count)}:
            told = f"{len(tensor.parts)} parts, split_ngram_parts is {count}"
            yield Finding.LOST, f"{name} is in {told}: it places their rows by that number"


def file_findings(folder: Path, engine: EngineRules) -> Found:
    for names in engine.files:
        if not any((folder / name).is_file() for name in names.split("|")):
            yield Finding.MISSING, names.replace("|", " or ")
    images = folder / "preprocessor_config.json"
    limits = read_json_object(images, "settings") if images.is_file() else {"size": _HUBS}
    if engine.reads_older_keys and "max_pixels" not in limits and limits.get("size") != _HUBS:
        yield Finding.LOST, f"{images.name}: no min_pixels, max_pixels: it takes the hub's"
    found = read_folder_templates(folder)
    if found is None or (engine.templates and found.file.name not in engine.templates):
        yield Finding.MISSING, "a chat template: chat_template.jinja"
    if not (folder / FILE_NAME).is_file():
        yield Finding.NOTE, f"no {FILE_NAME}: only the tokenizer's eos_token ends answers"
    yield from _disagreements(folder)
    others = {file.name for file in folder.glob("*.safetensors*")} - {"model.safetensors"}
    if engine.reads_all_files and others and "model.safetensors.index.json" not in others:
        told = "the engine reads all files as weights; serve final/, or move it away"
        yield Finding.REFUSED, f"{', '.join(sorted(others))}: {told}"


def _disagreements(folder: Path) -> Found:
    """Files of which programs, or their versions, take different ones."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file() and index.is_file():
        shards = read_json_object(index, "a shard index").get("weight_map")
        if not isinstance(shards, dict) or set(shards.values()) != {single.name}:
            told = f"transformers reads {single.name}, others the files of {index.name}"
            yield Finding.LOST, f"{told}: remove the one that is older"
    for kind in (processor_class(folder).image_processor_class, VideoProcessor):
        stored = list(kind.stored_in(folder))
        if len(stored) > 1 and stored[0] != stored[1]:
            told = f"{NESTED_CONFIG_FILE} and {kind.config_file} differ"
            yield Finding.LOST, f"{told}: transformers 5 reads the first, others the second"
    named = [each for each in stored_templates(folder) if each[0].name != "tokenizer_config.json"]
    for file, templates in named[1:]:
        first, taken = named[0]
        if templates.get("default") != taken.get("default"):
            told = f"the chat templates of {first.name} and {file.name} differ"
            yield Finding.LOST, f"{told}: transformers' processors read the first, others another"


def _value(values: Any, key: str) -> Any:
    """An entry by its dotted key; None where there is none."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def tensor_findings(
    wanted: Mapping[str, Any],
    stored: Mapping[str, ReadableTensor],
    engine: EngineRules,
    model_type: str,
) -> Found:
    named = defaultdict[tuple[Finding, str], list[str]](list)
    for name in sorted(wanted.keys() | stored.keys()):
        if name not in stored:
            named[engine.missing, "tensors that the folder lacks"].append(name)
        elif name not in wanted:
            fitting = (k for p, k in engine.unknown if fnmatchcase(f"{model_type}:{name}", p))
            named[next(fitting), "tensors that the model does not have"].append(name)
        elif stored[name].shape != wanted[name]:
            told = f"{name} {list(stored[name].shape)}, not {list(wanted[name])}"
            named[Finding.REFUSED, "tensors of another shape"].append(told)
        elif stored[name].dtype not in FLOATING:
            told = f"{name} {stored[name].dtype}"
            named[Finding.LOST, "tensors of no floating point numbers"].append(told)
        elif ".mlp.experts." in name:
            layout, shape = (
                _LAYOUTS[getattr(stored[name], "is_swapped", None)],
                stored[name].shape,
            )
            if engine.tells_by_shape and (model_type, layout) == _TURNED and shape[1] == shape[2]:
                told = "square experts, which it takes as swapped: other answers"
                named[Finding.LOST, told].append(name)
            if f"{model_type} {layout}" not in engine.experts:
                named[Finding.REFUSED, f"experts stored {layout}"].append(name)
    for (kind, what), names in named.items():
        left = len(names) - _NAMES_IN_A_LINE
        more = f" and {left} more" if left > 0 else ""
        yield kind, f"{what}: {', '.join(names[:_NAMES_IN_A_LINE])}{more}"
