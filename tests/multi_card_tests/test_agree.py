"""What all ranks must have alike before a run begins, over 3 real processes.

Guarantees: fields that only some ranks' data have are named on every rank alike with who has them
and who does not, whether the others say so or do not name them; equal fields pass, in any order.
"""

from functools import partial

import paddle.distributed as dist
import pytest

from paddle_vl.parallel.agree import check_fields_agree
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.topology import initialize
from tests.support.launch import launch, outcome_of, run_checks

# By rank.
FIELDS = {
    "equal": [
        {"response": True, "subgoal": False},
        {"subgoal": False, "response": True},
        {"response": True},
    ],
    "one": [{"response": True, "metadata": True}, {"response": True}, {"response": True}],
    "two": [
        {"metadata": True, "subgoal": False},
        {"metadata": False, "subgoal": True},
        {"metadata": True, "subgoal": True},
    ],
}
ENDS = {
    "one": "metadata (rank 0 with it, ranks 1, 2 without). ",
    "two": (
        "metadata (ranks 0, 2 with it, rank 1 without); "
        "subgoal (ranks 1, 2 with it, rank 0 without). "
    ),
}


def error(name: str) -> str | None:
    rank = dist.get_rank()
    try:
        check_fields_agree(FIELDS[name][rank], f"rank {rank}")
    except ValueError as found:
        return str(found)
    return None


def worker() -> dict:
    initialize(ParallelDegrees(dp_degree=3))
    return run_checks({name: partial(error, name) for name in FIELDS})


@pytest.fixture(scope="module")
def outcomes():
    return launch(worker, 3)


def test_equal_fields_pass(outcomes):
    assert outcome_of(outcomes, "equal") == [None] * 3


@pytest.mark.parametrize("name", ENDS)
def test_fields_of_some_ranks_alone_are_named_on_every_rank(outcomes, name):
    for rank, message in enumerate(outcome_of(outcomes, name)):
        assert message.startswith(f"rank {rank}: the processes of this run do not have the same ")
        assert f"optional fields in their data: {ENDS[name]}" in message
