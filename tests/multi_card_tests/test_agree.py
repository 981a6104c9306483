"""Values gathered from all ranks, and the checks built on them, on 3 ranks.

Guarantees:

- values of any length return unchanged and in rank order, over all ranks and in a subgroup;
- every rank names the optional fields that only some ranks' data have, with those ranks;
- equal fields pass in any order;
- every rank refuses data that differs on one of them, and names it.
"""

import math
from collections.abc import Callable
from functools import partial

import paddle.distributed as dist
import pytest

from paddle_vl.parallel.agree import (
    check_data_agree,
    check_fields_agree,
    gather_bytes,
    gather_values,
)
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.topology import initialize
from tests.support.launch import launch, outcome_of, run_checks

VALUES = [
    {"text": "Bär \U0001f43b", "numbers": [1, -2, 0.1, 10**30], "nested": {"": [None, True]}},
    "x" * 70_000,
    None,
]


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


STREAMS = [{"seed": 1, "contents": {"books": 2**63 + (rank == 2)}} for rank in range(3)]


def error(check: Callable, values: list) -> str | None:
    rank = dist.get_rank()
    try:
        check(values[rank], f"rank {rank}")
    except ValueError as found:
        return str(found)
    return None


def worker() -> dict:
    rank = initialize(ParallelDegrees(dp_degree=3)).rank
    pair = dist.new_group([0, 2])
    in_pair = (lambda value: gather_values(value, pair)) if rank != 1 else (lambda value: [])
    return run_checks(
        {
            "values": lambda: gather_values(VALUES[rank]),
            "pair": lambda: in_pair({"rank": rank}),
            "not finite": lambda: gather_values([math.inf, rank]),
            "bytes": lambda: gather_bytes(bytes([rank]) * rank),
            "nothing": lambda: gather_bytes(b""),
            **{
                f"fields {name}": partial(error, check_fields_agree, values)
                for name, values in FIELDS.items()
            },
            "data": lambda: error(check_data_agree, STREAMS),
            "same data": lambda: error(check_data_agree, STREAMS[:1] * 3),
        }
    )


@pytest.fixture(scope="module")
def outcomes():
    return launch(worker, 3)


def test_values_come_back_as_they_were(outcomes):
    assert outcome_of(outcomes, "values") == [VALUES] * 3
    assert outcome_of(outcomes, "pair") == [
        [{"rank": 0}, {"rank": 2}],
        [],
        [{"rank": 0}, {"rank": 2}],
    ]
    assert outcome_of(outcomes, "not finite") == [[[math.inf, rank] for rank in range(3)]] * 3


def test_bytes_of_different_lengths_come_back(outcomes):
    assert outcome_of(outcomes, "bytes") == [[b"", b"\1", b"\2\2"]] * 3
    assert outcome_of(outcomes, "nothing") == [[b"", b"", b""]] * 3


def test_other_data_on_one_rank_is_refused_by_every_rank(outcomes):
    for rank, message in enumerate(outcome_of(outcomes, "data")):
        assert message.startswith(f"rank {rank}: the ranks of this run do not read the same data: ")
        assert "contents (rank 2 unlike rank 0). Give all machines the same data" in message
    assert outcome_of(outcomes, "same data") == [None] * 3


def test_equal_fields_pass(outcomes):
    assert outcome_of(outcomes, "fields equal") == [None] * 3


@pytest.mark.parametrize("name", ENDS)
def test_fields_of_some_ranks_alone_are_named_on_every_rank(outcomes, name):
    for rank, message in enumerate(outcome_of(outcomes, f"fields {name}")):
        assert message.startswith(f"rank {rank}: the ranks of this run do not have the same ")
        assert f"optional fields in their data: {ENDS[name]}" in message
