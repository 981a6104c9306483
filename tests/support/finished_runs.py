"""Outputs of finished runs for comparison: arrays, and metrics that equal runs have in common."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl import PI07HighLevelPlanner, PI07LowLevelPolicy
from paddle_vl.checkpoint.manifest import Manifest, damaged_files
from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.families.pi07.config import PLANNER_TYPE
from tests.support.tolerance import TOPOLOGY

_OF_THE_MACHINE = ("_per_second", "_seconds", "memory")
# How samples lie on ranks, over steps since a report or a resume.
_OF_THE_RANKS = ("tokens_per_step", "rank_sequence_length", "token_imbalance")


def metrics_of(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def lasting(lines: list[dict]) -> list[dict]:
    """The lines without timings, memory and counts per rank, which equal runs may differ in."""
    left_out = (*_OF_THE_MACHINE, *_OF_THE_RANKS)
    return [
        {key: v for key, v in line.items() if not any(part in key for part in left_out)}
        for line in lines
    ]


def lasting_metrics(folder: Path) -> list[dict]:
    """Lines of a run's metrics.jsonl, see `lasting`."""
    return lasting(metrics_of(folder))


def arrays_of(
    checkpoint: Path, kinds: Sequence[str] = ("model", "optimizer")
) -> dict[str, np.ndarray]:
    """Every full parameter and optimizer state of a checkpoint."""
    stored = [read_checkpoint_headers(checkpoint, kind) for kind in kinds]
    return {name: tensor.read() for headers in stored for name, tensor in headers.items()}


def assert_one_file_of_weights(final: Path, wanted: Path) -> None:
    """Assert that a policy's `final/` is one file that other readers open, with the weights and
    statistics of another `final/`."""
    assert [file.name for file in final.glob("model*")] == ["model.safetensors"]
    found = load_file(final / "model.safetensors")
    assert_close(found, load_file(wanted / "model.safetensors"))
    is_planner = json.loads((final / "config.json").read_text())["type"] == PLANNER_TYPE
    (PI07HighLevelPlanner if is_planner else PI07LowLevelPolicy).from_pretrained(final)
    assert Manifest.read(final).files.keys() >= {"model.safetensors", "config.json"}
    assert not damaged_files(final, Manifest.read(final).files)


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Assert that every array is within the tolerance of its largest entry."""
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        assert found[key].shape == array.shape, key
        error = np.abs(found[key] - array).max()
        assert error <= TOPOLOGY * max(np.abs(array).max(), 1e-6), key


def assert_near(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Parameters within 1e-6; moments within `TOPOLOGY` of the largest of their kind.

    Gradients of routers and of the tower's biases are small sums of large terms, so that rounding
    is large beside their own largest entries.
    """
    assert found.keys() == wanted.keys()
    kinds = {key: key.partition("/")[2] for key in wanted}
    largest = dict.fromkeys(kinds.values(), 0.0)
    for key, array in wanted.items():
        largest[kinds[key]] = max(largest[kinds[key]], float(np.abs(array).max()))
    for key, array in wanted.items():
        allowed = TOPOLOGY * largest[kinds[key]] if kinds[key] else 1e-6
        assert np.abs(found[key] - array).max() <= allowed, key


def assert_same_answers(found: Path, wanted: Path) -> list[str]:
    """Assert that the answers of the last evaluations are equal; returns their texts."""
    ours, theirs = ((run / "predictions.jsonl").read_text().splitlines() for run in (found, wanted))
    assert ours == theirs
    return [json.loads(line)["answer"] for line in theirs]


def assert_equal_runs(
    found: Path, wanted: Path, checkpoint: str = "checkpoint-4", lacking: str = "-"
) -> None:
    """Assert that every metric of every step and every array of a checkpoint are equal.

    Args:
        lacking: how metrics begin that the found run cannot have.
    """
    for ours, theirs in zip(lasting_metrics(found), lasting_metrics(wanted), strict=True):
        theirs = {key: value for key, value in theirs.items() if not key.startswith(lacking)}
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=TOPOLOGY), (theirs["step"], key)
    assert_close(arrays_of(found / checkpoint), arrays_of(wanted / checkpoint))
