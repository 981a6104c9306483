"""What an export of a policy or a planner consists of: programs, inputs to check them, files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from paddle.static import InputSpec

from paddle_vl.config.families import family_of_folder
from paddle_vl.export.pi07.planner_programs import (
    DecodeProgram,
    ImagesProgram,
    PastDecodeProgram,
    PrefillProgram,
)
from paddle_vl.export.pi07.programs import ActionsProgram, PrefixProgram, StepProgram
from paddle_vl.export.writing import ModelToExport, ProgramToExport
from paddle_vl.families.pi07.base_policy import BasePolicy
from paddle_vl.families.pi07.layers import PAD_ID
from paddle_vl.families.pi07.planner import PI07HighLevelPlanner
from paddle_vl.families.pi07.policy import PI07LowLevelPolicy
from paddle_vl.families.pi07.prefix_layout import RESPONSE_LABEL
from paddle_vl.families.policy.features import CURRENT_CONFIG_VERSION
from paddle_vl.families.policy.images import cameras_of
from paddle_vl.families.policy.normalizers import STATISTICS_FILE, save_statistics

# Sizes of the examples: samples, and tokens or frames where they are free.
_SAMPLES, _LENGTH, _FRAMES = 2, 6, 2


def to_export(folder: Path, base: str | None) -> ModelToExport:
    """The programs of a policy's or a planner's folder.

    Raises:
        ValueError: a base is given, which only adapters have.
    """
    if base is not None:
        raise ValueError(f"{folder} is a pi07 policy, which has no adapters: leave --base out")
    if "pi07_high_level" in family_of_folder(folder).model_types:
        return planner_to_export(PI07HighLevelPlanner.from_pretrained(folder))
    return policy_to_export(PI07LowLevelPolicy.from_pretrained(folder))


def policy_to_export(policy: PI07LowLevelPolicy) -> ModelToExport:
    """The three programs of a policy, with inputs to check them."""
    model, rng = policy.model, np.random.default_rng(0)
    layers = PrefixProgram(model), StepProgram(model), ActionsProgram(model)
    prefix, step, actions = layers
    examples = _prefix_example(prefix, rng), _example(step, rng), _example(actions, rng)

    def programs(layers: tuple[Any, Any, Any]) -> dict[str, ProgramToExport]:
        names = {"prefix": "prefix", "step": "expert", "actions": "expert"}
        return {
            name: ProgramToExport(layer, weights, example, measured_output=int(name == "prefix"))
            for (name, weights), layer, example in zip(names.items(), layers, examples, strict=True)
        }

    return ModelToExport(
        "pi07_low_level",
        {"num_groups": _num_groups(policy)},
        programs(layers),
        lambda folder: _save_files(policy, folder),
        # A layer is traced once.
        programs((PrefixProgram(model), StepProgram(model), ActionsProgram(model))),
    )


def planner_to_export(planner: PI07HighLevelPlanner) -> ModelToExport:
    """The three programs of a planner, with inputs to check them."""
    model, rng = planner.model, np.random.default_rng(0)
    images, prefill, decode = ImagesProgram(model), PrefillProgram(model), DecodeProgram(model)
    place = _LENGTH - 3
    decode_example = _example(decode, rng) | {
        "pad_masks": np.arange(_LENGTH) < [[_LENGTH - 1], [_LENGTH - 1]],
        "place": np.array([place]),
    }
    images_example, prefill_example = _example(images, rng), _example(prefill, rng)
    # The two new tokens after the keys and values before them.
    past_example = {
        name: array[:, :place] if array.ndim == 4 else array
        for name, array in decode_example.items()
        if name != "place"
    } | {"pad_masks": decode_example["pad_masks"][:, : place + 2]}
    return ModelToExport(
        "pi07_high_level",
        {
            "num_groups": _num_groups(planner),
            "response_label": model.tokens.label_ids[RESPONSE_LABEL],
            "pad_id": PAD_ID,
        },
        {
            "images": ProgramToExport(images, "images", images_example),
            "prefill": ProgramToExport(prefill, "decoder", prefill_example, True),
            "decode": ProgramToExport(decode, "decoder", decode_example, True),
        },
        lambda folder: _save_files(planner, folder),
        {
            "images": ProgramToExport(ImagesProgram(model), "images", images_example),
            "prefill": ProgramToExport(PrefillProgram(model), "decoder", prefill_example),
            "decode": ProgramToExport(PastDecodeProgram(model), "decoder", past_example),
        },
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
