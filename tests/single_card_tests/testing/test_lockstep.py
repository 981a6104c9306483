"""Ranks that hand over to each other at collectives: what these give, and how ranks disagree."""

import threading
import time

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_vl.testing import RanksDisagreeError, run_ranks

SIZE = 3


def group_of(placement):
    return placement.ops.mp_group


def own_values(rank: int, dtype: str = "float32") -> np.ndarray:
    return np.arange(12).reshape(6, 2).astype(dtype) * (rank + 1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bfloat16"])
def test_collectives_give_what_numpy_gives(dtype):
    every = [own_values(rank) for rank in range(SIZE)]

    def body(placement):
        group = group_of(placement)
        x = paddle.to_tensor(every[group.rank]).astype(dtype)
        found = {}
        for name, op in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
            found[name] = x.clone()
            dist.all_reduce(found[name], op=op, group=group)
        found["gathered"] = paddle.empty([SIZE * 6, 2], dtype=dtype)
        dist.stream.all_gather(found["gathered"], x, group=group)
        parts: list = []
        dist.all_gather(parts, x, group=group)
        found["parts"] = paddle.stack(parts)
        found["scattered"] = paddle.empty([2, 2], dtype=dtype)
        dist.stream.reduce_scatter(found["scattered"], x, group=group)
        found["broadcast"] = x.clone()
        dist.broadcast(found["broadcast"], src=1, group=group)
        dist.barrier(group=group)
        return {name: value.astype("float64").numpy() for name, value in found.items()}

    for rank, found in enumerate(run_ranks(body, SIZE).results):
        wanted = {
            "sum": sum(every),
            "max": np.max(every, axis=0),
            "gathered": np.concatenate(every),
            "parts": np.stack(every),
            "scattered": sum(every)[2 * rank : 2 * rank + 2],
            "broadcast": every[1],
        }
        assert set(found) == set(wanted)
        for name, array in wanted.items():
            assert (found[name] == array).all(), (rank, name)


def test_one_rank_runs_at_a_time_and_results_are_in_order():
    running, seen = [], []

    def body(placement):
        group = group_of(placement)
        for _ in range(5):
            assert not running
            running.append(group.rank)
            time.sleep(0.001)
            seen.append(running.pop())
            dist.all_reduce(paddle.ones([2]), group=group)
        return group.rank

    assert run_ranks(body, 4).results == [0, 1, 2, 3]
    # Between two collectives every rank runs once.
    assert [sorted(seen[i : i + 4]) for i in range(0, 20, 4)] == [[0, 1, 2, 3]] * 5
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith("simulated rank")}


def started(kind: str, group) -> None:
    """A collective, of which the last rank starts another kind."""
    is_other = group.rank == 2
    if kind == "gather" and is_other:
        dist.stream.all_gather(paddle.empty([12]), paddle.ones([4]), group=group)
        return
    x = paddle.ones(
        [4 + (kind == "shape" and is_other)],
        dtype="float64" if kind == "dtype" and is_other else "float32",
    )
    op = dist.ReduceOp.MAX if kind == "operation" and is_other else dist.ReduceOp.SUM
    dist.all_reduce(x, op=op, group=group)


@pytest.mark.parametrize(
    ("kind", "second"),
    [
        ("shape", r"float32 \[5\]"),
        ("dtype", r"float64 \[4\]"),
        ("gather", r"all_gather of float32 \[4\]"),
        ("operation", r"all_reduce \(MAX\)"),
    ],
)
def test_ranks_that_start_different_collectives_are_named(kind, second):
    def step(placement):
        dist.all_reduce(paddle.ones([1]), group=group_of(placement))
        started(kind, group_of(placement))

    pattern = (
        r"ranks [01] and 2 start different collectives as number 2: rank [01] waits in all_reduce "
        rf"\(SUM\) of float32 \[4\].*, called from testing/test_lockstep.py:\d+ in started; "
        rf"rank 2 waits in .*{second}"
    )
    with pytest.raises(RanksDisagreeError, match=pattern):
        run_ranks(step, SIZE)


def test_a_difference_in_the_backward_pass_is_named():
    def step(placement):
        x = paddle.ones([6, 4])
        x.stop_gradient = False
        y = placement.ops.enter_rows(x) if group_of(placement).rank else x[:2]
        placement.ops.enter_columns(y).sum().backward()

    pattern = "rank 0 has ended after 2 collectives.*rank [12] waits in all_gather .* in backward"
    with pytest.raises(RanksDisagreeError, match=pattern):
        run_ranks(step, SIZE)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("first", [False, True], ids=["after a collective", "at once"])
def test_the_first_error_of_a_rank_is_raised_as_it_is(failing, first):
    ended = []

    def step(placement):
        group = group_of(placement)
        try:
            if not first:
                dist.all_reduce(paddle.ones([2]), group=group)
            if group.rank == failing:
                raise KeyError("mine")
            dist.all_reduce(paddle.ones([2]), group=group)
        finally:
            ended.append(group.rank)

    with pytest.raises(KeyError, match="mine") as raised:
        run_ranks(step, SIZE)
    if hasattr(raised.value, "__notes__"):
        assert raised.value.__notes__ == [f"raised on simulated rank {failing} of {SIZE}"]
    assert failing in ended
    # No rank is left behind, and others can start.
    assert run_ranks(lambda placement: 1, SIZE).results == [1] * SIZE


def gathered_into(*arguments, **settings):
    return lambda x, group: dist.stream.all_gather(
        paddle.empty(*arguments, **settings), x, group=group
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, group: dist.stream.reduce_scatter(paddle.empty([3, 2]), x, group=group),
            "7 rows do not divide by 3 ranks",
        ),
        (gathered_into([7, 2]), r"needs an output of 42 elements of that dtype, got .*\[7, 2\]"),
        (gathered_into([21, 2], dtype="float64"), "42 elements of that dtype, got paddle.float64"),
        (lambda x, group: dist.send(x, 1, group=group), "simulated ranks have no send"),
    ],
)
def test_what_a_collective_does_not_take_is_refused(call, message):
    with pytest.raises((ValueError, AttributeError), match=message):
        run_ranks(lambda placement: call(paddle.ones([7, 2]), group_of(placement)), SIZE)
