"""Demonstrations into files that `DemonstrationsDataset` reads."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paddle_vl.families.pi07.demonstrations.sample import (
    NUMBER_TYPES,
    OPTIONAL_TEXTS,
    Demonstration,
    DemonstrationShapes,
    DemonstrationSource,
)


def write_demonstrations(source: DemonstrationSource, directory: str | Path) -> list[Path]:
    """Write all samples of a source, with PNG images beside them.

    What is filled up in a sample is left out, and what is absent. Texts and numbers are exact, and
    so are images of 8 bits a channel.

    Returns:
        A JSONL file for each group, in their order; a group without samples has none.
    """
    directory = Path(directory)
    lines: dict[int, list[str]] = {}
    for number in range(len(source)):
        sample = source.demonstration(number)
        folder = directory / "images" / f"{number:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        record = _record(sample, source.shapes, folder, directory)
        lines.setdefault(int(sample["dataset_index"]), []).append(json.dumps(record))
    files = []
    for group in sorted(lines):
        name = source.group_names[group].replace("::", "-")
        files.append(directory / f"{name}.jsonl")
        files[-1].write_text("\n".join(lines[group]) + "\n", encoding="utf-8")
    return files


def _record(
    sample: Demonstration, shapes: DemonstrationShapes, folder: Path, directory: Path
) -> dict[str, Any]:
    is_real = ~sample["obs_history_is_pad"]
    record: dict[str, Any] = {
        "prompt": sample["prompt"],
        "state": sample["state"][is_real].tolist(),
    }
    for camera in shapes.cameras:
        frames = sample[camera][is_real]
        paths = [folder / f"{camera}_{index}.png" for index in range(len(frames))]
        record[camera] = [_saved(*pair, directory) for pair in zip(frames, paths, strict=True)]
    if "actions" in sample:
        record["actions"] = sample["actions"][~sample["action_is_pad"]].tolist()
    record |= {name: sample[name] for name in OPTIONAL_TEXTS if sample.get(name)}
    for name in NUMBER_TYPES:
        if name in sample and not sample[f"{name}_is_pad"]:
            record[name] = sample[name].item()
    if "subgoal_is_pad" in sample and not sample["subgoal_is_pad"]:
        for goal in shapes.goals.values():
            record[goal] = _saved(sample[goal], folder / f"{goal}.png", directory)
    return record


def _saved(image_3HW: np.ndarray, path: Path, directory: Path) -> str:
    pixels = np.rint(image_3HW.transpose(1, 2, 0) * 255).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return os.path.relpath(path, directory)
