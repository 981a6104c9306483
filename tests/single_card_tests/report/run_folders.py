"""Run folders for tests of reports."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

LINES = [
    {"step": 10, "loss": 4.0, "grad_norm": 2.0, "learning_rate": 1e-3, "epoch": 0.5,
     "learning_rate/mergers": 1e-2, "tokens_per_second": 90.0, "skipped_updates": 0,
     "target_tokens": 100, "loader": "train.jsonl"},
    {"step": 20, "loss": None, "grad_norm": None, "learning_rate": 2e-3, "epoch": 1.0,
     "learning_rate/mergers": 2e-2, "tokens_per_second": 110.0, "skipped_updates": 10,
     "target_tokens": 100},
    {"step": 25, "eval_loss": 2.5},
    {"step": 30, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 1e-3, "epoch": 1.5,
     "learning_rate/mergers": 1e-2, "tokens_per_second": 100.0, "skipped_updates": 10,
     "target_tokens": 200, "eval_loss": 3.0, "quite_new": {"a_min": 1, "a_max": 3}},
]  # fmt: skip
SETTINGS = {
    "model": {"pretrained": "models/a", "freeze": ["vision"]},
    "train": {"output_dir": "runs/one", "max_steps": 30, "learning_rate": 0.002, "seed": 0},
}
START = {
    "started": "2026-11-21T10:00:00+00:00", "ended": "2026-11-21T11:05:00+00:00",
    "first_step": 0, "last_step": 30, "command": ["paddle-vl", "train", "a.yaml"],
    "folder": "/home/me", "git": {"revision": "0123456789abcdef", "is_dirty": True},
    "paddle_vl_git": None, "versions": {"python": "3.11.2", "numpy": "2.0.0"}, "host": "node",
    "platform": "Linux", "device": "cpu", "device_name": "EPYC", "num_processes": 4,
    "parallel": {"dp_degree": 2, "mp_degree": 2, "pp_degree": 1, "vision": "spread"},
}  # fmt: skip


def write_run(
    folder: Path,
    lines: Sequence[dict[str, Any]] = LINES,
    settings: dict[str, Any] | None = SETTINGS,
    starts: Sequence[dict[str, Any]] | None = (START,),
) -> Path:
    """Write metrics.jsonl and, unless they are None, config.yaml and run.json."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if settings is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    if starts is not None:
        (folder / "run.json").write_text(json.dumps({"starts": list(starts)}))
    return folder


def without(key: str) -> list[dict[str, Any]]:
    """The lines without this key."""
    return [{name: value for name, value in line.items() if name != key} for line in LINES]
