"""The launcher of the tests on several ranks.

Guarantees: results are returned in rank order; a rank that fails ends the others, and its output is
shown; ranks that hang are killed at the timeout, and their output is shown; no process is left; a
failing check does not fail the other checks.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paddle_vl.nn.dispatch import has_compiled
from tests.support.launch import launch, outcome_of, run_checks


def environment_of_rank(argument):
    names = ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "OMP_NUM_THREADS", "EXTRA")
    return argument, [os.environ[name] for name in names], has_compiled()


def test_results_come_back_by_rank():
    results = launch(
        environment_of_rank, processes=3, arguments=[{"a": 1}], environment={"EXTRA": "x"}
    )
    # With the kernels of a command.
    assert results == [({"a": 1}, [str(rank), "3", "1", "x"], has_compiled()) for rank in range(3)]


def wait_for_ever(folder, what_rank_1_does):
    """Rank 0 and a child process hang; rank 1 fails or hangs too."""
    if os.environ["PADDLE_TRAINER_ID"] == "1" and what_rank_1_does == "fails":
        raise ValueError("rank 1 has had enough")
    child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    for pid in (os.getpid(), child.pid):
        Path(folder, str(pid)).touch()
    print("now I wait", flush=True)
    threading.Event().wait()


def assert_gone(folder):
    # The killed grandchild may die later, and nobody reaps it.
    deadline = time.monotonic() + 60
    while any(is_alive(int(pid)) for pid in os.listdir(folder)):
        assert time.monotonic() < deadline


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_failing_rank_ends_the_others_and_is_shown(tmp_path):
    with pytest.raises(AssertionError, match=r"rank 1 of 2 ended with 1(.|\n)*had enough") as info:
        launch(wait_for_ever, processes=2, arguments=[str(tmp_path), "fails"])
    assert "now I wait" not in str(info.value)
    assert_gone(tmp_path)


def test_hanging_ranks_are_ended_and_shown(tmp_path):
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] still run after 8 s(.|\n)*I wait"):
        launch(wait_for_ever, processes=2, arguments=[str(tmp_path), "waits"], timeout=8)
    assert len(os.listdir(tmp_path)) == 4
    assert_gone(tmp_path)


def test_function_inside_another_is_refused():
    def inner():
        pass

    with pytest.raises(ValueError, match="inner is not a function at the top"):
        launch(inner, processes=1)


def fail():
    with pytest.raises(ValueError, match="never"):
        pass


def test_failing_check_is_reported_alone():
    outcomes = [run_checks({"good": lambda: 1}), run_checks({"good": lambda: 2})]
    assert outcome_of(outcomes, "good") == [1, 2]
    outcomes = [run_checks({"good": lambda: 1, "bad": int}), run_checks({"good": int, "bad": fail})]
    assert outcome_of(outcomes, "good") == [1, 0]
    with pytest.raises(AssertionError, match=r"check 'bad' on rank 1 of 2(.|\n)*DID NOT RAISE"):
        outcome_of(outcomes, "bad")
