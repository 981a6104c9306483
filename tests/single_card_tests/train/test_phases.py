"""Phase marks of a training step. Time is a counter here."""

import itertools

import paddle
import pytest

from paddle_vl.train import phases
from paddle_vl.train.phases import Phase, PhaseClock, phase


@pytest.fixture
def ticks(monkeypatch):
    """Every clock reading is a second after the previous one."""
    counter = itertools.count()
    monkeypatch.setattr(phases.time, "perf_counter", lambda: float(next(counter)))


def test_without_a_clock_a_mark_is_one_empty_context_and_nothing_waits(monkeypatch):
    monkeypatch.setattr(paddle.device, "synchronize", lambda: pytest.fail("waited"))
    assert phase(Phase.FORWARD) is phase(Phase.BACKWARD)
    with phase(Phase.FORWARD):
        pass


def test_phases_of_a_step_leave_no_time_out(ticks):
    clock = PhaseClock()
    with clock.step():
        for _ in range(2):
            with phase(Phase.FORWARD):
                pass
            with phase(Phase.BACKWARD):
                pass
    # Of an inner phase not to the outer.
    with clock.step(), phase(Phase.FORWARD), phase(Phase.HOST_TO_DEVICE):
        pass
    assert clock.steps == [
        # Nine readings: a second in each of four phases, and before, between and after them.
        {Phase.BETWEEN: 5.0, Phase.FORWARD: 2.0, Phase.BACKWARD: 2.0},
        {Phase.BETWEEN: 2.0, Phase.FORWARD: 2.0, Phase.HOST_TO_DEVICE: 1.0},
    ]


def test_a_step_that_raises_is_not_kept_and_the_next_begins_anew(ticks):
    clock = PhaseClock()
    with pytest.raises(KeyError), clock.step(), phase(Phase.FORWARD):
        raise KeyError
    assert phase(Phase.FORWARD) is phase(Phase.BACKWARD)
    with clock.step(), phase(Phase.CLIP):
        pass
    assert clock.steps == [{Phase.BETWEEN: 2.0, Phase.CLIP: 1.0}]


def test_the_clock_waits_for_a_gpu_and_not_for_a_cpu(monkeypatch):
    seen = []
    monkeypatch.setattr(phases.time, "perf_counter", lambda: float(seen.append("time") or 0))
    monkeypatch.setattr(paddle.device, "synchronize", lambda: seen.append("wait"))
    with PhaseClock().step(), phase(Phase.FORWARD):
        pass
    assert seen == ["time"] * 4
    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:0")
    with PhaseClock().step(), phase(Phase.FORWARD):
        pass
    assert seen[4:] == ["wait", "time"] * 4


def test_two_clocks_do_not_run_at_once():
    other = PhaseClock()
    with PhaseClock().step(), pytest.raises(RuntimeError, match="runs already"), other.step():
        pass
    assert phase(Phase.FORWARD) is phase(Phase.BACKWARD)
