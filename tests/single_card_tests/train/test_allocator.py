"""Flags of Paddle's allocator.

Guarantees: an unset flag gets its default and is told; a flag in the environment and a choice of
another allocator stay and are told; a run on a GPU logs the flags; run.json has them. On a CPU,
where they have no effect, nothing is said of them, nor does Paddle warn of the number of threads
that the user chose; a run leaves the picture of its loss.
"""

import json
import os
import subprocess
import sys

import paddle
import pytest
from PIL import Image

from paddle_vl.cli import commands
from paddle_vl.train.allocator import STRATEGY, VIRTUAL, allocator_flags, configure_allocator
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.forked import ROOT


@pytest.fixture(autouse=True)
def flags_as_paddle_has_them():
    kept = allocator_flags()
    paddle.set_flags({STRATEGY: "auto_growth", VIRTUAL: False})
    yield
    paddle.set_flags(kept)


def test_an_unset_flag_gets_its_default():
    told = configure_allocator({})
    assert paddle.get_flags(VIRTUAL) == {VIRTUAL: True}
    assert told == f"Paddle's allocator: {STRATEGY}=auto_growth, {VIRTUAL}=True"


@pytest.mark.parametrize(
    ("environment", "flag", "value"),
    [
        ({VIRTUAL: "0"}, VIRTUAL, False),
        ({STRATEGY: "naive_best_fit"}, STRATEGY, "naive_best_fit"),
        ({}, "FLAGS_use_auto_growth_v2", True),
    ],
)
def test_what_the_user_has_chosen_stays(environment, flag, value):
    paddle.set_flags({flag: value})
    told = configure_allocator(environment)
    assert paddle.get_flags([flag, VIRTUAL]) == {VIRTUAL: False, flag: value}
    assert f"{VIRTUAL}=False (you set {flag})" in told


def test_a_run_on_a_gpu_tells_the_flags(monkeypatch, caplog):
    monkeypatch.setattr(commands, "configure_runtime", lambda: None)
    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:0")
    with caplog.at_level("INFO"):
        commands.configure_training_runtime()
    assert f"{STRATEGY}=auto_growth" in caplog.text


def test_a_run_on_a_cpu_says_nothing_of_flags_and_threads(tmp_path):
    run_file = write_tiny_run(tmp_path / "run")
    started = [sys.executable, "-m", "paddle_vl", "train", str(run_file), "train.max_steps=1"]
    done = subprocess.run(
        started,
        cwd=ROOT,
        env=os.environ | {VIRTUAL: "0", "OMP_NUM_THREADS": "2", "PYTHONWARNINGS": "always"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for word in ("FLAGS", "OMP", "Warning", "WARNING"):
        assert word not in done.stderr
    out = tmp_path / "run" / "out"
    (start,) = json.loads((out / "run.json").read_text())["starts"]
    found = start["allocator"]
    assert (found[STRATEGY], found[VIRTUAL]) == ("auto_growth", False)
    # The recorded command starts the same run again.
    assert start["command"] == started
    with Image.open(out / "loss.png") as curve:
        assert curve.size == (1280, 800)
