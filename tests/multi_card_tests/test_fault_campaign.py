"""The fault campaign: a short one, and tests that it detects what it should.

Guarantees: faults that no other test injects into whole runs, of one and two ranks, lose no
checkpoint, leave no process running, and recovery is bit-identical. The campaign reports, with
another exit code, a process left running, a checkpoint altered or deleted during the run, weights
altered after the recovery, a missing line of metrics.jsonl, and a traceback of a run.
"""

import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fault_campaign import (
    KINDS,
    Fault,
    Trial,
    damaged_checkpoints,
    flip,
    plan,
    run_campaign,
    tracebacks,
    undisturbed,
    vanished_checkpoints,
)
from signalled_runs import ROOT, STARTS, checkpoint_steps, differences_of_runs, write_tiny_run

# Those that no other test injects into whole runs; every kind with every start takes 25 minutes:
# `tools/fault_campaign.py --all`.
CHOSEN = (
    "kill-in-replacement", "file-size-limit", "kill-worker", "kill-at-rename", "kill-rank-in-write",
    "kill-in-write", "stale-lock", "cut-metrics", "deleted-lock",
)  # fmt: skip


def campaign(*options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools" / "fault_campaign.py"), *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.heavy
def test_a_campaign_loses_nothing_and_leaves_nothing():
    number = str(len(CHOSEN))
    done = campaign("--jobs", "2", "--faults", number, "--kinds", *CHOSEN)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert last == f"{number} of {number} faults were recovered"
    assert sorted(line.split()[0] for line in lines) == sorted(CHOSEN)


def sabotage(trial: Trial) -> None:
    """Leave a process running and delete a checkpoint."""
    trial.wait("step", steps=range(5, 8))
    shutil.rmtree(trial.folder / "checkpoint-2")
    (rank,) = [process for process in trial.run.alive() if process.pid == trial.run.process.pid]
    subprocess.Popen(["sleep", "600"], env=rank.environ(), start_new_session=True)
    trial.run.send(signal.SIGKILL)


class FromTheEnd(random.Random):
    """Draws the last byte, which belongs to a tensor."""

    def randrange(self, stop: int) -> int:
        return stop - 1


@pytest.mark.heavy
def test_a_sabotaged_run_is_told():
    lines: list[str] = []
    fault = Fault("sabotage", sabotage, "")
    assert not run_campaign(plan([fault], ["one"], 0, 1), 1, lines.append)
    said = "\n".join(lines)
    assert said.endswith("0 of 1 faults were recovered")
    assert "checkpoint-2 is gone" in said
    assert "left running: sleep 600" in said
    assert "--kinds sabotage --starts one --seed 0 --faults 1" in said


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return undisturbed("one", write_tiny_run(tmp_path_factory.mktemp("reference")))


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    shutil.copytree(finished, tmp_path / "out")
    return tmp_path / "out"


def test_an_undisturbed_run_is_like_itself(finished, copy):
    assert differences_of_runs(copy, finished) == []
    assert damaged_checkpoints(copy, finished) == {}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_a_flipped_bit_of_a_checkpoint_is_noticed(finished, copy, file):
    flip(copy / "checkpoint-4" / file, FromTheEnd())
    assert list(damaged_checkpoints(copy, finished)) == [4]


def test_altered_weights_are_noticed(finished, copy):
    flip(copy / "final" / "model.safetensors", FromTheEnd())
    assert differences_of_runs(copy, finished)[0].startswith("final/model differs in 1 tensors")


def test_a_missing_line_of_metrics_is_noticed(finished, copy):
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:3] + lines[4:]))
    (difference,) = differences_of_runs(copy, finished)
    assert difference.startswith("metrics.jsonl: step 4 has None")


def test_tracebacks_are_found_but_for_an_interruption():
    chained = 'Traceback (most recent call last):\n  File "a"\n    b\nKeyError: 1\n\nDuring\n\n'
    interrupted = "Traceback (most recent call last):\n  File\nKeyboardInterrupt\n"
    interrupted += 'Traceback (most recent call last):\n  File "a", in less_than_ver\nValueError\n'
    last = "Traceback (most recent call last):\n  File\npaddle_vl.Error: it failed"
    found = tracebacks(f"step 1\n{chained}{interrupted}{last}")
    assert found == ["a traceback of KeyError: 1", "a traceback of paddle_vl.Error: it failed"]


def test_checkpoints_vanish_only_by_the_limit(copy):
    steps = checkpoint_steps(copy)
    assert vanished_checkpoints(steps, steps - {1, 2}, None) == [1, 2]
    assert vanished_checkpoints(steps, steps - {1, 2}, len(steps) - 2) == []
    assert vanished_checkpoints(steps, steps - {max(steps)}, 1) == [max(steps)]


def test_all_has_every_kind_with_every_start_and_all_sizes():
    planned = plan(list(KINDS.values()), list(STARTS), 0, None)
    assert len(planned) >= 200
    assert {(item.fault.name, item.start) for item in planned} >= {
        (fault.name, start) for fault in KINDS.values() for start in fault.starts
    }
    assert {STARTS[item.start].num_ranks for item in planned} == {1, 2, 4}
    assert planned == plan(list(KINDS.values()), list(STARTS), 0, None)
