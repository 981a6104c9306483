"""The training run of the fault injection: `paddle_vl.testing.tiny_run` with checkpoints."""

from pathlib import Path

import yaml

from paddle_vl.testing import tiny_run

NUM_STEPS = 12
SAVE_STEPS = 2


def write_tiny_run(folder: Path) -> Path:
    """Write all files of a run into `folder`; a step takes about 0.1 s.

    Returns:
        The settings, `run.yaml`.
    """
    path = tiny_run.write_tiny_run(folder, NUM_STEPS)
    lines = (folder / "train.jsonl").read_bytes().splitlines()
    (folder / "test.jsonl").write_bytes(b"\n".join(lines[:5]) + b"\n")
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    settings["data"]["eval"] = [str(folder / "test.jsonl")]
    del settings["data"]["num_workers"]
    settings["train"] |= {
        "per_device_train_batch_size": 2,
        "warmup_steps": 1,
        "eval_steps": 3,
        "save_steps": SAVE_STEPS,
    }
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path
