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
from functools import partial

import paddle
import paddle.distributed as dist
import pytest
from paddle.autograd import PyLayer

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


def recorded(group, checked: bool) -> tuple[list, list]:
    with record_collectives() as recording:
        recording.phase = "forward"
        if checked:
            with check_collectives(SECONDS):
                values = send_everything(group)
        else:
            values = send_everything(group)
    return recording.calls, values


def error_of(act, timeout: float = SECONDS) -> tuple[str, float]:
    """The error message of this rank, and the seconds until it was raised."""
    begin, message = time.monotonic(), ""
    try:
        with check_collectives(timeout) as recording:
            recording.phase = "first"
            dist.barrier()
            recording.phase = "second"
            act()
    except (RuntimeError, KeyError) as error:
        message = str(error)
    seconds = time.monotonic() - begin
    # The groups still work.
    x = paddle.ones([3])
    dist.all_reduce(x)
    assert x.numpy().tolist() == [float(dist.get_world_size())] * 3
    return message, seconds


def sum_of(size: int, dtype: str = "float32"):
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


def run_backward(size: int) -> None:
    x = paddle.zeros([1])
    x.stop_gradient = False
    Backward.apply(x, size).sum().backward()


def error_in_backward(rank: int) -> str:
    with pytest.raises(RuntimeError) as raised, check_collectives(SECONDS):
        run_backward(3 + rank)
    return str(raised.value)


def worker() -> dict:
    group = initialize(ParallelDegrees(dp_degree=4)).dp_group
    rank = group.rank
    cases = {
        "sizes": (sum_of(3), sum_of(4)),
        "dtypes": (sum_of(3), sum_of(3, "int32")),
        "kinds": (sum_of(3), lambda: dist.barrier()),
    }
    checks = {
        name: partial(error_of, first if rank == 0 else others)
        for name, (first, others) in cases.items()
    }
    for name, act in (("left", lambda: None), ("failed", raise_key_error)):
        checks[name] = partial(error_of, sum_of(3) if rank == 0 else act, SHORT_SECONDS)
    checks["plain"] = partial(recorded, group, False)
    checks["checked"] = partial(recorded, group, True)
    checks["backward"] = partial(error_in_backward, rank)
    return run_checks(checks)


@pytest.fixture(scope="module")
def outcomes():
    return launch(worker, 4)


def test_every_kind_is_recorded_once(outcomes):
    size = len(outcomes)
    everyone = tuple(range(size))
    own, row = 8 * size, 8
    for rank, (calls, _) in enumerate(outcome_of(outcomes, "plain")):
        pair = (rank, rank + 1) if rank % 2 == 0 else (rank - 1, rank)
        assert [(call.kind, call.ranks, call.num_bytes, call.dtype) for call in calls] == [
            ("all_gather", everyone, own, "float32"),
            ("all_gather", everyone, own, "float32"),
            ("reduce_scatter", everyone, own, "float32"),
            ("alltoall_single", everyone, own, "float32"),
            ("all_reduce", everyone, own, "float32"),
            ("broadcast", everyone, row, "float32"),
            # The size of an object, then the object.
            ("all_gather", everyone, 8, "int64"),
            ("all_gather", everyone, OBJECT_BYTES, "uint8"),
            ("send" if rank % 2 == 0 else "recv", pair, own, "float32"),
            ("barrier", everyone, 0, ""),
        ]
        assert {call.phase for call in calls} == {"forward"}
    assert first_difference([calls for calls, _ in outcome_of(outcomes, "plain")]) is None


def test_a_check_changes_nothing(outcomes):
    assert outcome_of(outcomes, "checked") == outcome_of(outcomes, "plain")


@pytest.mark.parametrize(
    ("name", "first", "others"),
    [
        ("sizes", "all_reduce of float32 [3]", "all_reduce of float32 [4]"),
        ("dtypes", "all_reduce of float32 [3]", "all_reduce of int32 [3]"),
        ("kinds", "all_reduce of float32 [3]", "barrier"),
    ],
)
def test_different_plans_are_named_on_every_rank(outcomes, name, first, others):
    found = outcome_of(outcomes, name)
    for message, seconds in found:
        assert message.startswith(f"collective 2 of ranks {list(range(len(outcomes)))}: ")
        assert f"rank 0 {first} in second, called from multi_card_tests/" in message
        assert f"ranks 1, 2, 3 {others} in second" in message
        assert seconds < SECONDS
    assert len({message for message, _ in found}) == 1


@pytest.mark.parametrize("name", ["left", "failed"])
def test_a_rank_that_does_no_more_is_named(outcomes, name):
    (message, _), *others = outcome_of(outcomes, name)
    assert "rank 0 all_reduce of float32 [3] in second" in message
    assert "rank 1 has not come within 4 s; its last collective: barrier in first" in message
    assert {message for message, _ in others} == {"'broken batch'" if name == "failed" else ""}


def test_a_difference_in_the_backward_pass_is_named(outcomes):
    for message in outcome_of(outcomes, "backward"):
        assert "rank 0 all_reduce of float32 [3] in backward, called from" in message
        assert "rank 1 all_reduce of float32 [4] in backward" in message


def run_as_asked() -> str | None:
    """A run that the environment variable checks."""
    group = initialize(ParallelDegrees(dp_degree=2)).dp_group
    try:
        dist.all_reduce(paddle.zeros([2 + group.rank]), group=group)
    except RuntimeError as error:
        return str(error)
    return None


def test_a_run_is_checked_when_the_environment_asks():
    for message in launch(run_as_asked, 2, environment={collective_check.VARIABLE: "60"}):
        assert "rank 0 all_reduce of float32 [2]" in message
        assert "rank 1 all_reduce of float32 [3]" in message


def train_a_policy(run_file: str, output_dir: str) -> int:
    """Train; returns how many collectives were checked."""
    checked = []
    meet = collective_check._Check.meet
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            collective_check._Check,
            "meet",
            lambda check, call: (checked.append(1), meet(check, call)),
        )
        overrides = [
            "parallel.sharding_degree=2",
            "parallel.sharding_stage=3",
            "train.per_device_train_batch_size=1",
            "train.max_steps=2",
            f"train.output_dir={output_dir}",
        ]
        assert build_trainer(load_run_config(run_file, overrides)).run() is None
    return len(checked)


def test_a_whole_run_passes_its_check(tmp_path):
    arguments = (str(write_tiny_policy_run(tmp_path)), str(tmp_path / "out"))
    asked = {collective_check.VARIABLE: "60"}
    counts = launch(train_a_policy, 2, arguments=arguments, environment=asked)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("value", ["yes", "0", "nan", "inf"])
def test_another_value_is_refused(value, monkeypatch):
    monkeypatch.setenv(collective_check.VARIABLE, value)
    with pytest.raises(ValueError, match=f"CHECK_COLLECTIVES is '{value}'; give the seconds"):
        collective_check.check_run_if_asked()
