"""LeRobot datasets beside what lerobot returned for them.

Beside a folder NAME lies `NAME.expected.json`: what lerobot returned for every frame, for windows
of delta timestamps, for a subset of episodes, and its statistics and tasks. Values must be equal to
the bit; depth in metres may differ by the last bit of lerobot's exponential.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.data.lerobot.dataset import LeRobotDataset
from paddle_vl.data.lerobot.statistics import stored_statistics

# A float32 step at 16, the most that depth plus shift reaches.
_DEPTH_STEP_M = 2e-6


def differences(root: Path, expected: Mapping[str, Any]) -> Iterator[str]:
    """What differs between a dataset and what is expected of it."""
    dataset = LeRobotDataset(root)
    metadata = dataset.metadata
    if len(dataset) != expected["num_frames"] or len(metadata.episodes) != expected["num_episodes"]:
        yield f"it has {len(dataset)} frames in {len(metadata.episodes)} episodes"
    if {str(number): task for number, task in metadata.tasks.items()} != expected["tasks"]:
        yield f"tasks are {metadata.tasks}"
    if metadata.tools != expected.get("tools"):
        yield f"tools are {metadata.tools}"
    for wanted in expected["frames"]:
        yield from _compared(dataset[wanted["index"]], wanted, f"frame {wanted['index']}")
    for wanted in expected["windows"]:
        window = dataset.window(wanted["index"], expected["delta_timestamps"])
        window["index"] = wanted["index"]
        yield from _compared(window, wanted, f"window {wanted['index']}")
    subset = expected["subset"]
    part = LeRobotDataset(root, episodes=subset["episodes"])
    if len(part) != subset["len"]:
        yield f"the subset has {len(part)} frames"
    for number, index in enumerate(subset["global_index_of_each_item"]):
        if (found := part[number]["index"]) != index:
            yield f"item {number} of the subset has index {found}, not {index}"
    yield from _compared_statistics(stored_statistics(metadata), expected["stats"])
    if "depth_in_metres" in expected:
        metres = LeRobotDataset(root, depth_unit="m")
        for wanted in expected["depth_in_metres"]:
            place = f"frame {wanted['index']} in metres"
            yield from _compared(metres[wanted["index"]], wanted, place)
        found = stored_statistics(metadata, "m")
        yield from _compared_statistics(found, expected["stats_depth_in_metres"])


def _compared(found: Mapping[str, Any], wanted: Mapping[str, Any], place: str) -> Iterator[str]:
    for name, value in wanted.items():
        if name not in found:
            yield f"{place}: there is no {name}"
        elif not _is_same(found[name], value):
            yield f"{place}: {name} is {_short(found[name])}, not {_short(value)}"


def _is_same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict) and "sha256_u8_hwc" in wanted:
        return _digest(found) == wanted["sha256_u8_hwc"]
    if isinstance(wanted, dict) and wanted.get("depth"):
        if _digest(found) == wanted["sha256_f32_chw"]:
            return True
        if found.max() > 100:
            return False
        names = ("min", "max", "mean")
        means = [abs(getattr(found.astype(float), name)() - wanted[name]) for name in names]
        return found.dtype == np.float32 and max(means) <= _DEPTH_STEP_M
    if isinstance(wanted, dict):
        # Older expectations of windows have the means of images in 0..1, channels first.
        means = [float(image.astype(np.float32).mean()) / 255 for image in found]
        return np.allclose(means, wanted["mean_per_step"], rtol=0, atol=1e-6)
    has_rows = isinstance(wanted, list) and wanted and isinstance(wanted[0], dict)
    # Frames of a window; rows of language are compared as they are.
    if has_rows and {"hwc", "chw"} & wanted[0].keys():
        return all(map(_is_same, found, wanted))
    if isinstance(found, np.ndarray | np.generic):
        return found.tolist() == wanted
    return found == wanted


def _digest(image: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(image).tobytes()).hexdigest()


def _compared_statistics(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    for name, stats in wanted.items():
        for stat, values in stats.items():
            own = found.get(name, {}).get(stat)
            if own is None or not np.array_equal(own, np.asarray(values, dtype=np.float64)):
                yield f"{stat} of {name} is {_short(own)}, not {_short(values)}"


def _short(value: Any) -> str:
    # NumPy prints fewer digits than may differ.
    return str(value.tolist() if isinstance(value, np.ndarray) else value)[:120]
