"""Runs of the tiny model, and their comparison."""

import json
from pathlib import Path

from paddle_vl.config.load import load_run_config
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.batches import assert_same_bits
from tests.support.finished_runs import arrays_of, lasting
from tests.support.finished_runs import metrics_of as run_metrics


def build(run_file: Path, output_dir: Path, *overrides: str):
    config = load_run_config(run_file, [f"train.output_dir={output_dir}", *overrides])
    return build_trainer(config)


def metrics_of(folder: Path) -> list[dict]:
    return lasting(run_metrics(folder))


def assert_same_run(one: Path, other: Path, begun_anew: str | None = None) -> None:
    """Equal parameters, state and metrics lines, except for keys that a resumed run restarts."""
    checkpoint = "checkpoint-4"
    is_adapter = (one / checkpoint / "adapter_model.safetensors").exists()
    kinds = ("adapter_model" if is_adapter else "model", "optimizer")
    expected, found = (arrays_of(folder / checkpoint, kinds) for folder in (one, other))
    assert_same_bits(found, expected)
    state, other_state = (
        json.loads((folder / checkpoint / "trainer_state.json").read_text())
        for folder in (one, other)
    )
    assert state == other_state
    lines, others = (
        [{k: v for k, v in line.items() if not begun_anew or begun_anew not in k} for line in run]
        for run in (metrics_of(one), metrics_of(other))
    )
    assert lines == others


def evaluated(data: Path) -> list[str]:
    return [f"data.eval=[{data}]", "train.eval_steps=2", "train.save_steps=2"]
