"""What an export of a policy or a planner consists of: programs, inputs to check them, files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from paddle.static import InputSpec

from paddle_vl.config.families import family_of_folder
from paddle_vl.export.pi07 import programs
from paddle_vl.export.writing import ModelToExport, ProgramToExport
from paddle_vl.families.pi07.layers import PAD_ID
from paddle_vl.families.pi07.planner import PI07HighLevelPlanner
from paddle_vl.families.pi07.policy import PI07LowLevelPolicy
from paddle_vl.families.pi07.prefix_layout import RESPONSE_LABEL
from paddle_vl.families.policy.features import CURRENT_CONFIG_VERSION
from paddle_vl.families.policy.images import cameras_of
from paddle_vl.families.policy.normalize import STATISTICS_FILE, save_statistics

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
    cameras = len(cameras_of(model.config.input_features))
    found = {
        "prefix": ProgramToExport(
            model,
            programs.prefix,
            programs.prefix_specs,
            "prefix",
            _prefix_example(programs.prefix_specs(model), cameras, rng),
            measured_output=1,
        )
    }
    for name, run, specs in (
        ("step", programs.step, programs.step_specs),
        ("actions", programs.actions, programs.actions_specs),
    ):
        found[name] = ProgramToExport(model, run, specs, "expert", _example(specs(model), rng))
    return _of_policy(policy, "pi07_low_level", {}, found, found)


def planner_to_export(planner: PI07HighLevelPlanner) -> ModelToExport:
    """The three programs of a planner, with inputs to check them."""
    model, rng = planner.model, np.random.default_rng(0)
    encoder, cameras = model.prefix.video_encoder, len(cameras_of(model.config.input_features))
    prompt = _example(programs.prefill_specs(model), rng)
    prompt["img_masks"] = np.ones((_SAMPLES, cameras), dtype=bool)
    prompt["image_rows"] = _drawn(rng, (cameras * _SAMPLES, *prompt["image_rows"].shape[1:]))
    # Two new tokens after others, and buffers that have one more.
    place, tokens = _LENGTH - 3, _example(programs.decode_specs(model), rng)
    tokens["input_ids"] = tokens["input_ids"][:, :2]
    is_real = np.ones((_SAMPLES, place + 2), dtype=bool)
    caches = {name: array for name, array in tokens.items() if array.ndim == 4}
    past = {"input_ids": tokens["input_ids"], "pad_masks": is_real}
    past |= {name: array[:, :place] for name, array in caches.items()}
    tokens["pad_masks"] = np.pad(is_real, ((0, 0), (0, 1)))
    tokens["place"] = np.array([place])
    found = {
        "images": ProgramToExport(
            encoder,
            programs.images,
            programs.images_specs,
            "images",
            _example(programs.images_specs(encoder), rng),
        ),
        "prefill": ProgramToExport(
            model, programs.prefill, programs.prefill_specs, "decoder", prompt, True
        ),
        "decode": ProgramToExport(
            model, programs.decode, programs.decode_specs, "decoder", tokens, True
        ),
    }
    with_past = ProgramToExport(
        model, programs.decode_with_past, programs.decode_with_past_specs, "decoder", past
    )
    sizes = {"response_label": model.tokens.label_ids[RESPONSE_LABEL], "pad_id": PAD_ID}
    return _of_policy(planner, "pi07_high_level", sizes, found, found | {"decode": with_past})


def _of_policy(
    policy: Any,
    model_type: str,
    sizes: dict[str, Any],
    found: dict[str, ProgramToExport],
    for_onnx: dict[str, ProgramToExport],
) -> ModelToExport:
    """An export with configuration, prompt tokenizer and statistics."""

    def save_files(folder: Path) -> None:
        config = policy.config
        if config.config_version is None:
            config = replace(config, config_version=CURRENT_CONFIG_VERSION)
        config.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        save_statistics(policy.normalizers, folder / STATISTICS_FILE)

    num_groups = policy.normalizers["normalize_inputs"].num_groups
    return ModelToExport(
        model_type, {"num_groups": num_groups, **sizes}, found, save_files, for_onnx
    )


def _prefix_example(
    specs: list[InputSpec], cameras: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Two samples, of which one has a subgoal and neither has a response."""
    found = _example(specs, rng)
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


def _example(specs: list[InputSpec], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """An input of each spec: drawn floats, ones, and masks that end with padding."""
    found = {}
    for one in specs:
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
    if "group_index" in found:
        found["group_index"] = np.array([0, 1])
    return found


def _drawn(rng: np.random.Generator, shape: Any) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)
