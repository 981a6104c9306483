"""Flags of Paddle's allocator.

Guarantees: unset flags get their defaults and are told; a flag in the environment, one that was set
before, and a choice of another allocator stay and are told; a run on a GPU logs the flags; run.json
and profile.json have them. On a CPU, where they have no effect, nothing is said of them, nor does
Paddle warn of the number of threads that the user chose; a run leaves the picture of its loss.
"""

import json
import os
import subprocess
import sys

import paddle
import pytest
from PIL import Image

from paddle_vl.cli import commands
from paddle_vl.train.allocator import DEFAULTS, allocator_flags, configure_allocator
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.forked import ROOT

STRATEGY, VIRTUAL = DEFAULTS


@pytest.fixture(autouse=True)
def flags_as_paddle_has_them():
    kept = allocator_flags()
    paddle.set_flags({name: flag.paddles for name, flag in DEFAULTS.items()})
    yield
    paddle.set_flags(kept)


def test_unset_flags_get_a_default():
    told = configure_allocator({})
    assert paddle.get_flags(VIRTUAL) == {VIRTUAL: True}
    assert told == (
        f"Paddle's allocator: {STRATEGY}=auto_growth (default here), {VIRTUAL}=true (default here)"
    )
    # The same when it is called again.
    assert configure_allocator({}) == told


def test_a_flag_in_the_environment_stays():
    told = configure_allocator({VIRTUAL: "0"})
    assert paddle.get_flags(VIRTUAL) == {VIRTUAL: False}
    assert f"{VIRTUAL}=false (set in the environment)" in told


@pytest.mark.parametrize(
    ("flag", "value", "origin"),
    [
        (STRATEGY, "naive_best_fit", f"left alone beside {STRATEGY}=naive_best_fit"),
        ("FLAGS_use_auto_growth_v2", True, "left alone beside FLAGS_use_auto_growth_v2"),
    ],
)
def test_another_allocator_is_left_alone(flag, value, origin):
    kept = paddle.get_flags(flag)
    paddle.set_flags({flag: value})
    try:
        told = configure_allocator({})
        assert paddle.get_flags([flag, VIRTUAL]) == {flag: value, VIRTUAL: False}
    finally:
        paddle.set_flags(kept)
    assert f"{VIRTUAL}=false ({origin})" in told


def test_a_run_on_a_gpu_tells_the_flags(monkeypatch, caplog):
    monkeypatch.setattr(commands, "configure_runtime", lambda: None)
    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:0")
    with caplog.at_level("INFO"):
        commands.configure_training_runtime()
    assert f"{STRATEGY}=auto_growth (default here)" in caplog.text


@pytest.mark.parametrize("command", ["train", "profile"])
def test_a_run_on_a_cpu_says_nothing_of_flags_and_threads(tmp_path, command):
    run_file = write_tiny_run(tmp_path / "run")
    arguments = {"train": ["train.max_steps=1"], "profile": ["--warmup", "0", "--steps", "1"]}
    started = [sys.executable, "-m", "paddle_vl", command, str(run_file), *arguments[command]]
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
    if command == "train":
        (start,) = json.loads((out / "run.json").read_text())["starts"]
        found = start["allocator"]
        with Image.open(out / "loss.png") as curve:
            assert curve.size == (1280, 800)
        # The recorded command starts the same run again.
        assert start["command"] == started
    else:
        found = json.loads((out / "profile" / "profile.json").read_text())["allocator_flags"]
    assert (found[STRATEGY], found[VIRTUAL]) == ("auto_growth", False)
