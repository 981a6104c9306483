"""Recorded and checked collectives on 4 ranks.

Guarantees:

- every kind of call is recorded once, with ranks, bytes, dtype and shape;
- every rank raises an error instead of hanging if ranks start different collectives, or if a rank
  leaves, fails or does not come. The error names the ranks, each one's collective, its position and
  its phase;
- a check changes neither records nor results;
- an environment variable checks a full run.
"""

import pickle
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from unittest import mock

import paddle
import paddle.distributed as dist
import pytest
from paddle.autograd import PyLayer
from paddle.distributed.fleet.utils.sequence_parallel_utils import ColumnSequenceParallelLinear

from paddle_vl.config.load import load_run_config
from paddle_vl.parallel import collective_check
from paddle_vl.parallel.collective_check import check_collectives
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.recorder import record_collectives
from paddle_vl.parallel.topology import initialize
from paddle_vl.testing import first_difference
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.support.launch import launch, outcome_of, run_checks

# Far below parallel.timeout_s, and far above what a check takes on a loaded machine.
SECONDS = 60.0
# For checks in which one rank never comes.
SHORT_SECONDS = 4.0
OBJECT_BYTES = len(pickle.dumps({"rank": 0}))


def send_everything(group) -> list:
    """Issue one collective of each kind; returns the resulting values."""
    size, rank = group.nranks, group.rank
    x = paddle.full([size, 2], float(rank))
    parts, rows, own, objects = [], paddle.empty([size * size, 2]), paddle.empty([1, 2]), []
    dist.all_gather(parts, x, group=group)
    dist.stream.all_gather(rows, x, group=group)
    dist.stream.reduce_scatter(own, x, group=group)
    exchanged = paddle.empty([size, 2])
    dist.alltoall_single(exchanged, x, group=group)
    dist.all_reduce(x, group=group)
    dist.broadcast(own, src=group.ranks[0], group=group)
    dist.all_gather_object(objects, {"rank": rank})
    peer = group.ranks[rank ^ 1]
    if rank % 2 == 0:
        dist.isend(x, peer, group).wait()
    else:
        dist.irecv(rows[:size], peer, group).wait()
    dist.barrier()
    return [value.numpy().tolist() for value in (*parts, rows, own, exchanged, x)] + objects


def every_kind_is_recorded_once(group) -> None:
    """And a check changes neither records nor results."""
    found = []
    for check in (nullcontext(), check_collectives(SECONDS)):
        with record_collectives() as recording:
            recording.phase = "forward"
            with check:
                values = send_everything(group)
        found.append((recording.calls, values))
    assert found[0] == found[1]
    calls, size, rank = recording.calls, group.nranks, group.rank
    everyone, own = tuple(range(size)), 8 * size
    pair = (rank, rank + 1) if rank % 2 == 0 else (rank - 1, rank)
    assert [(call.kind, call.ranks, call.num_bytes, call.dtype) for call in calls] == [
        ("all_gather", everyone, own, "float32"),
        ("all_gather", everyone, own, "float32"),
        ("reduce_scatter", everyone, own, "float32"),
        ("alltoall_single", everyone, own, "float32"),
        ("all_reduce", everyone, own, "float32"),
        ("broadcast", everyone, 8, "float32"),
        # The size of an object, then the object.
        ("all_gather", everyone, 8, "int64"),
        ("all_gather", everyone, OBJECT_BYTES, "uint8"),
        ("send" if rank % 2 == 0 else "recv", pair, own, "float32"),
        ("barrier", everyone, 0, ""),
    ]
    assert {call.phase for call in calls} == {"forward"}
    of_ranks: list[list] = []
    dist.all_gather_object(of_ranks, calls)
    assert first_difference(of_ranks) is None


def error_of(act: Callable, timeout: float = SECONDS, phase: str = "second") -> str:
    """The error message of this rank, within the time limit."""
    begin, message = time.monotonic(), ""
    try:
        with check_collectives(timeout) as recording:
            recording.phase = "first"
            dist.barrier()
            recording.phase = phase
            act()
    except (RuntimeError, KeyError) as error:
        message = str(error)
    assert time.monotonic() - begin < SECONDS
    # The groups still work.
    x = paddle.ones([3])
    dist.all_reduce(x)
    assert x.numpy().tolist() == [float(dist.get_world_size())] * 3
    return message


def sum_of(size: int, dtype: str = "float32") -> Callable:
    return lambda: dist.all_reduce(paddle.zeros([size], dtype=dtype))


def raise_key_error():
    raise KeyError("broken batch")


class Backward(PyLayer):
    """All-reduces a given number of values in the backward pass."""

    @staticmethod
    def forward(ctx, x, size):
        ctx.size = size
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        sum_of(ctx.size)()
        return grad


def in_backward(size: int) -> Callable:
    x = paddle.zeros([1])
    x.stop_gradient = False
    return lambda: Backward.apply(x, size).sum().backward()


# What rank 0 does and the others do, and how messages name these.
PLANS: dict[str, tuple[Callable, Callable, str, str]] = {
    "sizes": (sum_of(3), sum_of(4), "float32 [3] in second", "all_reduce of float32 [4] in second"),
    "dtypes": (
        sum_of(3), sum_of(3, "int32"), "float32 [3] in second", "all_reduce of int32 [3] in second",
    ),
    "kinds": (sum_of(3), dist.barrier, "float32 [3] in second", "barrier in second"),
    "backward": (
        in_backward(3), in_backward(4), "float32 [3] in backward",
        "all_reduce of float32 [4] in backward",
    ),
}  # fmt: skip


def different_plans_are_named(group, first: Callable, other: Callable, one: str, two: str) -> None:
    # A backward pass is a phase of its own where none is given.
    phase = "" if "backward" in one else "second"
    message = error_of(other if group.rank else first, phase=phase)
    assert message.startswith(f"collective 2 of ranks {list(range(group.nranks))}: ")
    assert f"rank 0 all_reduce of {one}, called from " in message
    assert f"ranks 1, 2, 3 {two}" in message


# What the other ranks do, and their last collective.
ENDS = {
    "left": (lambda: None, "leaves, end of the checked section"),
    "failed": (raise_key_error, "barrier in first"),
}


def a_rank_that_does_no_more_is_named(group, name: str) -> None:
    act, last = ENDS[name]
    message = error_of(act if group.rank else sum_of(3), SHORT_SECONDS)
    if group.rank == 0:
        assert "rank 0 all_reduce of float32 [3] in second" in message
        assert f"rank 1 has not come within 4 s; its last collective: {last}" in message
    elif name == "failed":
        assert message == "'broken batch'"
    else:
        assert "rank 0 has not come within 4 s; its last collective: all_reduce of" in message


def worker() -> dict:
    group = initialize(ParallelDegrees(dp_degree=4)).dp_group
    checks = {
        name: partial(different_plans_are_named, group, *plan) for name, plan in PLANS.items()
    }
    checks |= {name: partial(a_rank_that_does_no_more_is_named, group, name) for name in ENDS}
    return run_checks(checks | {"records": partial(every_kind_is_recorded_once, group)})


@pytest.fixture(scope="module")
def outcomes():
    return launch(worker, 4)


@pytest.mark.parametrize("name", ["records", *PLANS, *ENDS])
def test_collectives_are_recorded_and_checked(outcomes, name):
    outcome_of(outcomes, name)


def in_a_layer() -> str:
    """The error where ranks have different rows in a layer of fleet's."""
    rank = initialize(ParallelDegrees(mp_degree=2, sequence_parallel=True)).rank
    layer = ColumnSequenceParallelLinear(4, 8, gather_output=False, has_bias=False)
    with pytest.raises(RuntimeError) as raised, check_collectives(SECONDS):
        layer(paddle.ones([3 + rank, 4]))
    return str(raised.value)


def test_ranks_that_disagree_inside_of_a_layer_are_told():
    for message in launch(in_a_layer, 2):
        assert message.startswith("collective 1 of ranks [0, 1]: the ranks are about to do diff")
        for rank, rows in enumerate((3, 4)):
            assert f"rank {rank} all_gather of float32 [{rows}, 4], called from" in message


def train_a_policy(run_file: str, output_dir: str) -> tuple[int, str]:
    """Train, and let ranks differ then; returns how many collectives were checked in training, and
    the error."""
    checked = []
    meet = collective_check._Check.meet
    with mock.patch.object(
        collective_check._Check, "meet", lambda check, call: (checked.append(1), meet(check, call))
    ):
        overrides = [
            *("parallel.sharding_degree=2", "parallel.sharding_stage=3", "train.max_steps=2"),
            *("train.per_device_train_batch_size=1", f"train.output_dir={output_dir}"),
        ]
        trainer = build_trainer(load_run_config(run_file, overrides))
        assert trainer.run() is None
    with pytest.raises(RuntimeError) as raised:
        dist.all_reduce(paddle.zeros([2 + dist.get_rank()]))
    return len(checked), str(raised.value)


def test_a_run_is_checked_when_the_environment_asks(tmp_path):
    arguments = (str(write_tiny_policy_run(tmp_path)), str(tmp_path / "out"))
    asked = {collective_check.VARIABLE: "60"}
    (count, message), other = launch(train_a_policy, 2, arguments=arguments, environment=asked)
    assert other == (count, message)
    assert count > 0
    for rank, size in enumerate((2, 3)):
        assert f"rank {rank} all_reduce of float32 [{size}]" in message


@pytest.mark.parametrize("value", ["yes", "0", "nan", "inf"])
def test_another_value_is_refused(value, monkeypatch):
    monkeypatch.setenv(collective_check.VARIABLE, value)
    with pytest.raises(ValueError, match=f"CHECK_COLLECTIVES is '{value}'; give the seconds"):
        collective_check.check_run_if_asked()
