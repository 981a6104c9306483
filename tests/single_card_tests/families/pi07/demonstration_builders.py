"""Small shapes, records and image files for tests of demonstrations."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paddle_vl.families.policy.demonstrations.sample import DemonstrationShapes

SHAPES = DemonstrationShapes(
    cameras=("camera0", "camera1"),
    image_size=(8, 8),
    state_dim=2,
    n_obs_steps=3,
    chunk_size=4,
    action_dim=3,
)


def save_image(path: Path, level: int = 255, size: tuple[int, int] = (8, 8)) -> str:
    """Write an image of one grey level and return its name; `size` is (height, width)."""
    Image.fromarray(np.full((*size, 3), level, np.uint8)).save(path)
    return path.name


def line(directory: Path, num_frames: int = 3, **changes: Any) -> dict[str, Any]:
    """A record with all required entries; frame f has grey level 10 (f + 1)."""
    paths = [save_image(directory / f"f{f}.png", 10 * (f + 1)) for f in range(num_frames)]
    record = {
        "prompt": "go",
        "state": [[f + 1.0, -f] for f in range(num_frames)],
        "camera0": paths,
        "camera1": paths,
        "actions": [[c, c + 0.5, -c] for c in range(4)],
    }
    return record | changes


def write_lines(path: Path, *records: dict[str, Any] | str) -> Path:
    """Write a JSONL file; strings are written unchanged."""
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether samples or batches are bit-identical, with equal types."""
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name])
        and getattr(one[name], "dtype", type(one[name]))
        == getattr(other[name], "dtype", type(other[name]))
        for name in one
    )
