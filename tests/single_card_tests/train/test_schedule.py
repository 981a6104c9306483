"""Learning rate per step. The oracle is the formula of HF's lambda at single steps."""

import math

import pytest

from paddle_vl.config.schema import TrainConfig
from paddle_vl.train.schedule import RunLength, learning_rate


def rates(steps, num_steps=10, **settings):
    train = TrainConfig(output_dir="o", learning_rate=0.2, **settings)
    return [learning_rate(step, num_steps, train) for step in steps]


CONSTANT = {"lr_scheduler_type": "constant", "warmup_steps": 2}


@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        ({"warmup_steps": 4}, [0, 1, 2, 3, 4], [0, 0.05, 0.1, 0.15, 0.2]),
        ({"warmup_steps": 2}, [2, 4, 6, 10], [0.2, 0.1 * (1 + math.cos(math.pi / 4)), 0.1, 0.0]),
        ({"min_lr_ratio": 0.1}, [0, 5, 10], [0.2, 0.11, 0.02]),
        ({"min_lr_ratio": 0.5}, [11, 30], [0.1, 0.1]),
        (CONSTANT, [0, 1, 2, 9], [0.0, 0.1, 0.2, 0.2]),
    ],
)
def test_rates_are_those_of_hf(settings, steps, expected):
    assert rates(steps, **settings) == pytest.approx(expected)


def test_opentaus_cosine_counts_the_warmup_and_begins_above_zero():
    """Values of OpenTau's schedule: warmup 10, decay 100, peak 2.5e-5, final 2.5e-6."""
    expected = {
        0: 2.2727272727272728e-06, 9: 2.272727272727273e-05, 10: 2.444938580832048e-05,
        50: 1.3750000000000002e-05, 99: 2.50555119588552e-06, 129: 2.5e-06,
    }  # fmt: skip
    train = TrainConfig(
        output_dir="o",
        learning_rate=2.5e-5,
        min_lr_ratio=0.1,
        warmup_steps=10,
        lr_scheduler_type="cosine_decay_with_warmup",
        decay_steps=100,
    )
    found = {step: learning_rate(step, 1000, train) for step in expected}
    assert found == pytest.approx(expected, rel=1e-12)


STABLE = {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 2, "decay_ratio": 0.4}


@pytest.mark.parametrize(
    ("decay_type", "factors"),
    [
        ("linear", [1, 0.75, 0.5, 0.25, 0]),
        (
            "cosine",
            [1, 0.5 * (1 + math.cos(math.pi / 4)), 0.5, 0.5 * (1 - math.cos(math.pi / 4)), 0],
        ),
        ("1-sqrt", [1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0]),
    ],
)
def test_stable_phase_ends_in_a_decay(decay_type, factors):
    found = rates(range(11), decay_type=decay_type, **STABLE)
    assert found[:6] == pytest.approx([0, 0.1, 0.2, 0.2, 0.2, 0.2])
    assert found[6:] == pytest.approx([0.2 * factor for factor in factors])
    floored = rates(range(6, 11), decay_type=decay_type, min_lr_ratio=0.1, **STABLE)
    assert floored == pytest.approx([0.2 * (0.9 * factor + 0.1) for factor in factors])


def test_a_longer_run_continues_the_stable_phase_of_a_shorter_one():
    short, endless = (rates(range(6), **STABLE | {"decay_ratio": ratio}) for ratio in (0.4, 0.0))
    longer = rates(range(6), num_steps=25, **STABLE)
    assert short == endless == longer
    assert rates([10], **STABLE | {"decay_ratio": 0.0}) == [0.2]


@pytest.mark.parametrize("kind", ["cosine", "constant", "warmup_stable_decay"])
def test_a_run_of_tokens_has_the_rates_of_the_same_share_of_steps(kind):
    settings = {"lr_scheduler_type": kind, "warmup_ratio": 0.2}
    settings |= {"decay_ratio": 0.3} if kind == "warmup_stable_decay" else {}
    in_steps = rates(range(10), **settings)
    assert in_steps[:3] == pytest.approx([0.0, 0.1, 0.2])
    in_tokens = rates([700 * step for step in range(10)], num_steps=7000, **settings)
    assert in_tokens == pytest.approx(in_steps)


def test_a_run_of_tokens_is_over_with_the_step_that_reaches_them():
    length = RunLength(tokens=100)
    assert [length.is_reached(step, step * 30) for step in range(5)] == [False] * 4 + [True]
    assert length.is_reached(1, 100)
    assert [RunLength(2).is_reached(step, 1000) for step in (1, 2)] == [False, True]
