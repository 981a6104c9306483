"""Values gathered from all ranks, and the checks built on them, on 3 ranks.

Guarantees:

- values of any length return unchanged and in rank order, over all ranks and in a subgroup;
- every rank names the optional fields that only some ranks' data have, with those ranks;
- equal fields pass in any order;
- every rank refuses data that differs on one of them, and names it.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

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
# What each rank gives, and what all get.
GATHERED: dict[str, tuple[Callable, list, list]] = {
    "values": (gather_values, VALUES, VALUES),
    "not finite": (gather_values, *[[[math.inf, rank] for rank in range(3)]] * 2),
    "bytes": (gather_bytes, *[[b"", b"\1", b"\2\2"]] * 2),
    "nothing": (gather_bytes, *[[b""] * 3] * 2),
}
ONE = [{"response": True, "metadata": True}, {"response": True}, {"response": True}]
TWO = [{"metadata": True, "subgoal": False}, {"metadata": False, "subgoal": True},
       {"metadata": True, "subgoal": True}]  # fmt: skip
STREAMS = [{"seed": 1, "contents": {"books": 2**63 + (rank == 2)}} for rank in range(3)]
_FIELDS = "the ranks of this run do not have the same optional fields in their data: "
# By rank, and the beginning of the error after the rank.
CHECKED: dict[str, tuple[Callable, list[dict], str | None]] = {
    "equal fields": (
        check_fields_agree,
        [{"response": True, "subgoal": False}, {"subgoal": False, "response": True},
         {"response": True}],
        None,
    ),
    "one field": (
        check_fields_agree, ONE, f"{_FIELDS}metadata (rank 0 with it, ranks 1, 2 without). ",
    ),
    "two fields": (
        check_fields_agree,
        TWO,
        f"{_FIELDS}metadata (ranks 0, 2 with it, rank 1 without); "
        "subgoal (ranks 1, 2 with it, rank 0 without). ",
    ),
    "the same data": (check_data_agree, STREAMS[:1] * 3, None),
    "other data": (
        check_data_agree,
        STREAMS,
        "the ranks of this run do not read the same data: contents (rank 2 unlike rank 0). "
        "Give all machines the same data",
    ),
}  # fmt: skip


def gathers(gather: Callable, values: list, wanted: list) -> None:
    assert gather(values[dist.get_rank()]) == wanted


def gathers_in_a_pair(pair: Any) -> None:
    if dist.get_rank() != 1:
        found = gather_values({"rank": dist.get_rank()}, pair)
        assert found == [{"rank": 0}, {"rank": 2}]


def names_what_differs(check: Callable, values: list[dict], message: str | None) -> None:
    rank = dist.get_rank()
    if message is None:
        check(values[rank], f"rank {rank}")
        return
    with pytest.raises(ValueError, match=re.escape(f"rank {rank}: {message}")):
        check(values[rank], f"rank {rank}")


def worker() -> dict:
    initialize(ParallelDegrees(dp_degree=3))
    checks = {name: partial(gathers, *case) for name, case in GATHERED.items()}
    checks |= {name: partial(names_what_differs, *case) for name, case in CHECKED.items()}
    return run_checks(checks | {"pair": partial(gathers_in_a_pair, dist.new_group([0, 2]))})


@pytest.fixture(scope="module")
def outcomes():
    return launch(worker, 3)


@pytest.mark.parametrize("name", [*GATHERED, "pair", *CHECKED])
def test_all_ranks_agree(outcomes, name):
    outcome_of(outcomes, name)
