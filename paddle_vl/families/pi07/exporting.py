"""What an export of a policy or a planner consists of: programs, inputs to check them, files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from paddle.static import InputSpec

from paddle_vl.export.writing import ModelToExport, ProgramToExport
from paddle_vl.families.pi07.base_policy import BasePolicy
from paddle_vl.families.pi07.inputs.model_inputs import cameras_of
from paddle_vl.families.pi07.inputs.normalizers import STATISTICS_FILE, save_statistics
from paddle_vl.families.pi07.layers import PAD_ID
from paddle_vl.families.pi07.planner import PI07HighLevelPlanner
from paddle_vl.families.pi07.planner_programs import DecodeProgram, ImagesProgram, PrefillProgram
from paddle_vl.families.pi07.policy import PI07LowLevelPolicy
from paddle_vl.families.pi07.policy_config import CURRENT_CONFIG_VERSION
from paddle_vl.families.pi07.prefix_layout import RESPONSE_LABEL
from paddle_vl.families.pi07.programs import ActionsProgram, PrefixProgram, StepProgram
from paddle_vl.nn.matrices import matrices

# Sizes of the examples: samples, and tokens or frames where they are free.
_SAMPLES, _LENGTH, _FRAMES = 2, 6, 2


def policy_to_export(policy: PI07LowLevelPolicy) -> ModelToExport:
    """The three programs of a policy, with inputs to check them."""
    model, rng = policy.model, np.random.default_rng(0)
    prefix, step, actions = PrefixProgram(model), StepProgram(model), ActionsProgram(model)
    return ModelToExport(
        "pi07_low_level",
        {"num_groups": _num_groups(policy)},
        {
            "prefix": ProgramToExport(
                prefix, "prefix", _prefix_example(prefix, rng), measured_output=1
            ),
            "step": ProgramToExport(step, "expert", _example(step, rng)),
            "actions": ProgramToExport(actions, "expert", _example(actions, rng)),
        },
        lambda folder: _save_files(policy, folder),
        quantized=list(matrices(model.decoder, prefix.prefix.embed_tokens)),
    )


def planner_to_export(planner: PI07HighLevelPlanner) -> ModelToExport:
    """The three programs of a planner, with inputs to check them."""
    model, rng = planner.model, np.random.default_rng(0)
    images, prefill, decode = ImagesProgram(model), PrefillProgram(model), DecodeProgram(model)
    decode_example = _example(decode, rng) | {
        "pad_masks": np.arange(_LENGTH) < [[_LENGTH - 1], [_LENGTH - 1]],
        "place": np.array([_LENGTH - 3]),
    }
    return ModelToExport(
        "pi07_high_level",
        {
            "num_groups": _num_groups(planner),
            "response_label": model.tokens.label_ids[RESPONSE_LABEL],
            "pad_id": PAD_ID,
        },
        {
            "images": ProgramToExport(images, "images", _example(images, rng)),
            "prefill": ProgramToExport(prefill, "decoder", _example(prefill, rng), True),
            "decode": ProgramToExport(decode, "decoder", decode_example, True),
        },
        lambda folder: _save_files(planner, folder),
        quantized=list(matrices(model.decoder, prefill.lm_head, prefill.embed_tokens)),
    )


def _prefix_example(program: PrefixProgram, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Two samples, of which one has a subgoal and neither has a response."""
    cameras = len(cameras_of(program.config.input_features))
    found = _example(program, rng)
    for name in ("vid_masks", "subgoal_masks", "subgoal_rows"):
        found[name] = np.ascontiguousarray(found[name][:, :cameras])
    frames = _FRAMES if "frame_is_pad" in found else 1
    shape = found["stills"].shape[1:]
    found["videos"] = rng.random((cameras * _SAMPLES, frames, *shape), dtype=np.float32)
    if "frame_is_pad" in found:
        found["frame_is_pad"] = np.zeros((cameras * _SAMPLES, frames), dtype=bool)
        found["frame_is_pad"][::2, 0] = True
    found["history_is_pad"] = np.zeros((_SAMPLES, frames), dtype=bool)
    found["state"] = _drawn(rng, (_SAMPLES, frames, found["state"].shape[-1]))
    found["stills"] = found["stills"][:1]
    found["subgoal_rows"][:] = len(found["videos"])
    found["subgoal_masks"][1:] = False
    found["response_masks"][:] = False
    return found


def _example(program: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """An input of each spec: drawn floats, ones, and masks that end with padding."""
    found = {}
    for one in flat_specs(program.input_spec()):
        shape = [size if size > 0 else _LENGTH for size in one.shape]
        if one.shape[0] < 1:
            shape[0] = _SAMPLES
        if str(one.dtype).endswith("float32"):
            found[one.name] = _drawn(rng, shape)
        elif str(one.dtype).endswith("bool"):
            found[one.name] = np.ones(shape, dtype=bool)
            found[one.name][1:, shape[1] * 2 // 3 + 1 :] = False
        else:
            found[one.name] = np.ones(shape, dtype=np.int64)
    if "num_steps" in found:
        found["num_steps"] = np.array([3])
    if "step" in found:
        found["step"] = np.array([-0.25], dtype=np.float32)
    if "image_rows" in found:
        cameras = len(cameras_of(program.config.input_features))
        found["img_masks"] = np.ones((_SAMPLES, cameras), dtype=bool)
        found["image_rows"] = _drawn(rng, (cameras * _SAMPLES, *found["image_rows"].shape[1:]))
    if "input_ids" in found:
        found["input_ids"] = found["input_ids"][:, :2]
    if "group_index" in found:
        found["group_index"] = np.array([0, 1])
    return found


def flat_specs(specs: list) -> list[InputSpec]:
    """Input specs without their grouping."""
    return [one for item in specs for one in (item if isinstance(item, list) else [item])]


def _drawn(rng: np.random.Generator, shape: Any) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def _num_groups(policy: BasePolicy) -> int:
    return policy.normalizers["normalize_inputs"].num_groups


def _save_files(policy: Any, folder: Path) -> None:
    """Configuration, prompt tokenizer and statistics."""
    config = policy.config
    if config.config_version is None:
        config = replace(config, config_version=CURRENT_CONFIG_VERSION)
    config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    save_statistics(policy.normalizers, folder / STATISTICS_FILE)
