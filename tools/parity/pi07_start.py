"""Golden cases of pi07 from a folder of Gemma 3, and of a policy's folder back to OpenTau.

A folder with `facts.json` has three kinds of cases:

- `hub_NAME/`: policy and planner on this backbone, with images of the size in
  `policy_folder/config.json`. Every tensor of `expected_NAME.safetensors` is equal, and what
  `numbers_NAME.safetensors` has is near: 1e-4 relative plus 1e-5 absolute.
- `policy_folder/`: read and written again, it has the same names, dtypes, shapes, bits and fields.
- `facts.json`: the laws of what is drawn, by mean, deviation and largest value.
"""

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle

from paddle_vl import PI07HighLevelPlanner, PI07LowLevelPolicy
from paddle_vl.checkpoint.safetensors_io import read_header
from paddle_vl.checkpoint.writing import parameter_array
from paddle_vl.config.section import flatten
from paddle_vl.families.pi07.checkpoint_map import UNUSED_KEYS
from paddle_vl.families.pi07.config import PI07Config, PI07PlannerConfig
from paddle_vl.families.pi07.decoder import prefix_positions
from paddle_vl.families.pi07.gemma import resampled_positions, with_backbone
from paddle_vl.nn.attention_masks import BlockMask
from parity.comparison import CaseReport
from parity.golden import Case, Folders
from parity.pi07_golden import ATOL, RTOL
from parity.pi07_policy import CharacterTokenizer, FirstValueActionTokenizer
from parity.recording import array

_FEATURES = ("hf_image_features", "features_after_resampling")
_TEXT = ("hf_text_hidden", "hf_text_hidden_noscale_nowindow", "pi07_text_hidden")
# Standard errors by which a drawn tensor's moments may differ from the golden ones, and the
# largest value over the deviation that only a uniform law stays below in many values.
_ERRORS, _UNIFORM, _MANY = 6, 2.0, 300


class StartFolders(Folders[Case]):
    """The three kinds of cases."""

    def _case(self, file: Path) -> Case | None:
        root, name = file.parent, file.parent.name
        has_weights = any(root.glob("model*.safetensors"))
        if file.name == "config.json" and has_weights and (root.parent / "facts.json").is_file():
            kind = "start" if name.startswith("hub_") else "back"
            return Case(f"{root.parent.name}/{name}", kind, file, self)
        return Case(f"{name}/laws", "laws", file, self) if file.name == "facts.json" else None


FOLDERS = StartFolders


def run_cases(
    golden: StartFolders, cases: list[Case], scale: float, dtype: str
) -> Iterator[CaseReport]:
    """Yield a report for every case."""
    runners = {"start": _run_start, "back": _run_back, "laws": _run_laws}
    for case in cases:
        report = CaseReport(case.name, scale)
        if dtype != "float32":
            report.unsupported = f"dtype {dtype}: the case is for float32"
        else:
            try:
                runners[case.kind](case, report)
            except (KeyError, ValueError, RuntimeError) as error:
                report.unsupported = f"{type(error).__name__}: {error}"
        yield report


def _policy_values(root: Path) -> dict[str, Any]:
    """The configuration of the case's policy without that of its backbone."""
    values = json.loads((root / "policy_folder" / "config.json").read_text(encoding="utf-8"))
    del values["vlm_config"]["gemma3_config"]
    return values


def _policy(root: Path, hub: Path, **engine: Any) -> PI07LowLevelPolicy:
    config = PI07Config.from_dict(with_backbone(_policy_values(root), hub))
    config = replace(config, vlm_config=replace(config.vlm_config, **engine))
    labels = FirstValueActionTokenizer(config.vlm_config.discrete_action_vocab_size or 40)
    tokenizers: dict[str, Any] = {"tokenizer": CharacterTokenizer({}), "action_tokenizer": labels}
    return PI07LowLevelPolicy.from_pretrained(hub, config=config, **tokenizers)


def _run_start(case: Case, compare: CaseReport) -> None:
    hub = case.file.parent
    root, name = hub.parent, hub.name.removeprefix("hub_")
    expected, numbers = (
        {key: tensor.read() for key, tensor in read_header(file).items()} if file.is_file() else {}
        for file in (root / f"{kind}_{name}.safetensors" for kind in ("expected", "numbers"))
    )
    compare.golden = expected | numbers
    policy = _policy(root, hub)
    values = _policy_values(root)
    shared = {key: values[key] for key in ("input_features", "resize_imgs_with_padding")}
    planned = {"type": PI07PlannerConfig.type_name, **shared}
    planner = PI07HighLevelPlanner.from_pretrained(
        hub,
        config=PI07PlannerConfig.from_dict(with_backbone(planned, hub)),
        tokenizer=CharacterTokenizer({}),
    )
    for group, model in (("policy", policy.model), ("planner", planner.model)):
        weights = {item.key: parameter_array(item) for item in model.stored_parameters()}
        for key in sorted(expected):
            compare.exact(group, key, weights[key])
        table = next(value for key, value in weights.items() if "position_embedding" in key)
        if (wanted := "position_embedding_resampled_bf16") in numbers:
            compare.exact("positions", wanted, table)
    if "position_embedding_hub" in numbers:
        side = policy.config.vlm_config.gemma3_config.vision_config.grid_side
        stored = numbers["position_embedding_hub"]
        given: Any = SimpleNamespace(shape=stored.shape, dtype="F32", read=lambda **_: stored)
        table = resampled_positions(given, side).read()
        compare.near("positions", "position_embedding_resampled_f32", table, RTOL, ATOL)
    if "image" in numbers:
        _compare_images(policy, numbers, compare)
    if "ids" in numbers:
        own = _policy(root, hub, use_gemma3_attention=True).model
        for names, model in (
            (_TEXT[:1], own),
            (_TEXT[1:], policy.model),
            (_TEXT[1:], planner.model),
        ):
            hidden = _text_hidden(model, numbers["ids"])
            for name in sorted({*names} & numbers.keys()):
                compare.near("text", name, hidden, RTOL, ATOL)
    compare.compared |= {"image", "ids", "position_embedding_hub"}
    compare.all_compared()


def _compare_images(
    policy: PI07LowLevelPolicy, numbers: dict[str, np.ndarray], compare: CaseReport
) -> None:
    encoder, image = policy.model.prefix.video_encoder, paddle.to_tensor(numbers["image"])
    found = {"subgoal": array(encoder(None, None, image * 2.0 - 1.0))}
    for name in numbers:
        # Equal frames, none of them padding.
        times = re.fullmatch(r"video_T(\d+)(_repeat)?", name)
        if times is not None or name in _FEATURES:
            frames = 1 if times is None else int(times[1])
            is_pad = paddle.zeros([len(image), frames], "bool")
            found[name] = array(encoder(paddle.stack([image] * frames, axis=1), is_pad))
    for name in sorted(found.keys() & numbers):
        compare.near("images", name, found[name], RTOL, ATOL)


def _text_hidden(model: Any, ids_BL: np.ndarray) -> np.ndarray:
    """Hidden states `[B, L, D]` of a causal text, after the final norm."""
    pad_BL = paddle.ones(ids_BL.shape, dtype="bool")
    view = model.decoder.view(prefix_positions(pad_BL), BlockMask(pad_BL, pad_BL))
    rows_BLD = model.prefix.embed_tokens(paddle.to_tensor(ids_BL))
    return array(model.decoder(rows_BLD, prefix_view=view).prefix)


def _run_back(case: Case, compare: CaseReport) -> None:
    theirs, is_planner = case.file.parent, case.meta["type"] == PI07PlannerConfig.type_name
    stand_in: dict[str, Any] = {"tokenizer": CharacterTokenizer({})}
    kind = PI07HighLevelPlanner if is_planner else PI07LowLevelPolicy
    policy: Any = kind.from_pretrained(theirs, dtype="auto", **stand_in)
    policy.save_tokenizers = lambda folder: None
    with tempfile.TemporaryDirectory() as ours:
        policy.save_pretrained(ours)
        folders = (Path(ours), theirs)
        tensors = [read_header(folder / "model.safetensors") for folder in folders]
        heads = ({key: (t.dtype, t.shape) for key, t in each.items()} for each in tensors)
        _compare_maps(compare, "tensors", *heads)
        values = ({key: t.read().tobytes() for key, t in each.items()} for each in tensors)
        _compare_maps(compare, "values", *values)
        texts = ((folder / "config.json").read_text(encoding="utf-8") for folder in folders)
        _compare_maps(compare, "fields", *(flatten(json.loads(text)) for text in texts))


def _compare_maps(
    compare: CaseReport, group: str, found: dict[str, Any], wanted: dict[str, Any]
) -> None:
    pairs = {key: (found.get(key, ...), wanted.get(key, ...)) for key in found | wanted}
    wrong = sorted(key for key, (ours, theirs) in pairs.items() if ours != theirs)
    compare.exact(group, ", ".join(wrong[:3]), len(wrong), 0)


def _run_laws(case: Case, compare: CaseReport) -> None:
    paddle.seed(0)
    policy = _policy(case.file.parent, min(case.file.parent.glob("hub_*")))
    drawn = {item.key: parameter_array(item) for item in policy.model.stored_parameters()}
    wanted = {key: law for key, law in case.meta["not_loaded"].items() if key not in UNUSED_KEYS}
    compare.exact("keys", "drawn", sorted(wanted.keys() - drawn), [])
    for key in sorted(wanted):
        law, value = wanted[key], drawn[key].astype(np.float64)
        error = _ERRORS / value.size**0.5
        compare.exact("shapes", key, value.shape, law["shape"])
        compare.absolute("means", key, value.mean(), error * law["std"], law["mean"])
        compare.near("deviations", key, value.std(), error, 1e-12, law["std"])
        if value.size >= _MANY and law["std"]:
            ratios = [np.abs(value).max() / value.std(), law["absmax"] / law["std"]]
            compare.exact("uniform", key, *(ratio < _UNIFORM for ratio in ratios))
