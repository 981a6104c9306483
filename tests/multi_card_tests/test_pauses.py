"""A rank that is paused for longer than others wait.

Guarantees: the run ends with an error that names the rank and how to continue, started as users
start it.
"""

import signal
import time
from pathlib import Path

import pytest

from signalled_runs import SignalledRun, write_tiny_run

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("run") / "data")


def test_a_rank_that_is_later_than_the_limit_is_named(run_file, tmp_path):
    overrides = ("parallel.timeout_s=8", "train.max_steps=100000")
    with SignalledRun("nproc", run_file, tmp_path / "out", overrides) as run:
        run.wait_for_steps()
        run.rank(1).send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        ended = run.ended(begin, within_s=180)
    assert ended.code == 1
    assert ended.left == []
    late = "rank 0: a collective failed: got no answer from rank 1"
    assert late in ended.output, ended.output
    assert "train.resume_from_checkpoint=auto" in ended.output
    assert "workerlog.1" in ended.output
