"""Late ranks: paused, or busy with something else.

Guarantees: a rank that is paused at a random moment for longer than gloo's own 30 seconds changes
no bit of the result; a rank that is later than parallel.timeout_s ends the run with an error that
names the rank and how to continue. Runs start as users start them.
"""

import random
import signal
import time
from pathlib import Path

import pytest

from signalled_runs import NUM_STEPS, SignalledRun, differences_of_runs, write_tiny_run

pytestmark = pytest.mark.heavy
# Messages between stages, and collectives.
TOPOLOGY = ("parallel.mp_degree=1", "parallel.dp_degree=2", "parallel.pp_degree=2")
PAUSE_S = 32


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("run") / "data")


def test_a_paused_rank_changes_nothing(run_file, tmp_path):
    rng = random.Random(str(tmp_path))
    with SignalledRun("nproc4", run_file, tmp_path / "out", TOPOLOGY) as run:
        run.wait_for_steps(rng.randrange(1, NUM_STEPS - 3))
        time.sleep(rng.uniform(0, 0.2))
        rank = run.rank(rng.randrange(2))
        rank.send_signal(signal.SIGSTOP)
        time.sleep(PAUSE_S)
        assert run.last_step() < NUM_STEPS
        rank.send_signal(signal.SIGCONT)
        ended = run.ended(time.monotonic())
    assert ended.code == 0, ended.output
    assert ended.last_step == NUM_STEPS
    with SignalledRun("nproc4", run_file, tmp_path / "whole", TOPOLOGY) as whole:
        assert whole.ended(time.monotonic()).code == 0
    assert differences_of_runs(tmp_path / "out", tmp_path / "whole") == []


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
