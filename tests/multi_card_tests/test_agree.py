"""Values gathered from all ranks, and the checks built on them, on 3 ranks.

Guarantees:

- values of any length return unchanged and in rank order, over all ranks and in a subgroup;
- every rank names each key whose values differ, with the values and their ranks;
- equal values pass in any order.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

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
# What each rank gives, and what all get.
GATHERED: dict[str, tuple[Callable, list, list]] = {
    "values": (gather_values, VALUES, VALUES),
    "not finite": (gather_values, *[[[math.inf, rank] for rank in range(3)]] * 2),
}
# By rank, and the end of the error.
CHECKED: dict[str, tuple[list[dict], str | None]] = {
    "equal": (
        [{"a": True, "b": [1, None]}, {"b": [1, None], "a": True}, {"a": True, "b": [1, None]}],
        None,
    ),
    "one key": (
        [{"a": True, "b": 1}, {"a": True}, {"a": True}],
        "b (rank 0 1, ranks 1, 2 None). mend it",
    ),
    "two keys": (
        [{"b": 1}, {"a": 2}, {"b": 1, "a": 2}],
        "a (rank 0 None, ranks 1, 2 2); b (ranks 0, 2 1, rank 1 None). mend it",
    ),
}


def gathers(gather: Callable, values: list, wanted: list) -> None:
    assert gather(values[dist.get_rank()]) == wanted


def gathers_in_a_pair(pair: Any) -> None:
    if dist.get_rank() != 1:
        found = gather_values({"rank": dist.get_rank()}, pair)
        assert found == [{"rank": 0}, {"rank": 2}]


def names_what_differs(values: list[dict], message: str | None) -> None:
    rank = dist.get_rank()
    if message is None:
        check_agree(values[rank], f"rank {rank}", "differ", "mend it")
        return
    whole = re.escape(f"rank {rank}: the ranks of this run differ: {message}")
    with pytest.raises(ValueError, match=f"^{whole}$"):
        check_agree(values[rank], f"rank {rank}", "differ", "mend it")


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
