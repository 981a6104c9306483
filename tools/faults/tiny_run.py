"""The training run of the fault injection: `paddle_vl.testing.tiny_run` with checkpoints."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from paddle_vl.testing import tiny_run

NUM_STEPS = 12
SAVE_STEPS = 2


def write_tiny_run(folder: Path, extra_lines: Sequence[bytes] = ()) -> Path:
    """Write all files of a run into `folder`; a step takes about 0.1 s.

    Args:
        extra_lines: lines inserted into train.jsonl after the third; bad ones are skipped.

    Returns:
        The settings, `run.yaml`.
    """
    path, train = tiny_run.write_tiny_run(folder, NUM_STEPS), folder / "train.jsonl"
    lines = train.read_bytes().splitlines()
    (folder / "test.jsonl").write_bytes(b"\n".join(lines[:5]) + b"\n")
    train.write_bytes(b"\n".join([*lines[:3], *extra_lines, *lines[3:]]) + b"\n")
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    settings["data"] |= {
        "eval": [str(folder / "test.jsonl")],
        "on_bad_sample": "skip" if extra_lines else "fail",
    }
    del settings["data"]["num_workers"]
    settings["train"] |= {
        "per_device_train_batch_size": 2,
        "warmup_steps": 1,
        "eval_steps": 3,
        "save_steps": SAVE_STEPS,
    }
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path
