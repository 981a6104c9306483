"""Values gathered from all ranks, and the checks built on them, on 3 ranks.

Guarantees:

- values of any length return unchanged and in rank order, over all ranks and in a subgroup;
- every rank names each key whose values differ, with the values and their ranks;
- equal values pass in any order.
"""

import math
from functools import partial

import paddle.distributed as dist
import pytest

from paddle_vl.parallel.agree import check_agree, gather_values
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
        {"a": True, "b": [1, None]},
        {"b": [1, None], "a": True},
        {"a": True, "b": [1, None]},
    ],
    "one": [{"a": True, "b": 1}, {"a": True}, {"a": True}],
    "two": [{"b": 1}, {"a": 2}, {"b": 1, "a": 2}],
}
ENDS = {
    "one": "b (rank 0 1, ranks 1, 2 None). mend it",
    "two": "a (rank 0 None, ranks 1, 2 2); b (ranks 0, 2 1, rank 1 None). mend it",
}


def error(values: list) -> str | None:
    rank = dist.get_rank()
    try:
        check_agree(values[rank], f"rank {rank}", "differ", "mend it")
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
            **{f"fields {name}": partial(error, values) for name, values in FIELDS.items()},
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


def test_equal_values_pass(outcomes):
    assert outcome_of(outcomes, "fields equal") == [None] * 3


@pytest.mark.parametrize("name", ENDS)
def test_values_that_differ_are_named_on_every_rank_with_their_ranks(outcomes, name):
    for rank, message in enumerate(outcome_of(outcomes, f"fields {name}")):
        assert message == f"rank {rank}: the ranks of this run differ: {ENDS[name]}"
