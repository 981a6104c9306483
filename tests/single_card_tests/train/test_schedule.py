"""Learning rate per step.

Guarantees: HF's cosine with a floor and its constant schedule, both after a linear warmup from 0,
and OpenTau's cosine. The oracle is the formula of HF's lambda at single steps.
"""

import math

import pytest

from paddle_vl.config.schema import TrainConfig
from paddle_vl.train.schedule import learning_rate


def rates(steps, num_steps=10, **settings):
    train = TrainConfig(output_dir="o", learning_rate=0.2, **settings)
    return [learning_rate(step, num_steps, train) for step in steps]


def test_warmup_rises_from_zero_to_the_peak():
    assert rates([0, 1, 2, 3, 4], warmup_steps=4) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


def test_cosine_runs_from_peak_to_zero():
    expected = [0.2, 0.1 * (1 + math.cos(math.pi * 0.25)), 0.1, 0.0]
    assert rates([2, 4, 6, 10], warmup_steps=2) == pytest.approx(expected)


def test_cosine_ends_at_the_floor():
    assert rates([0, 5, 10], min_lr_ratio=0.1) == pytest.approx([0.2, 0.11, 0.02])


def test_constant_stays_at_the_peak():
    assert rates([0, 1, 2, 9], lr_scheduler_type="constant", warmup_steps=2) == pytest.approx(
        [0.0, 0.1, 0.2, 0.2]
    )


def test_rate_beyond_the_end_stays_at_the_floor():
    assert rates([11, 30], min_lr_ratio=0.5) == pytest.approx([0.1, 0.1])


def test_opentaus_cosine_counts_the_warmup_and_begins_above_zero():
    """Values of OpenTau's schedule: warmup 10, decay 100, peak 2.5e-5, final 2.5e-6."""
    expected = {
        0: 2.2727272727272728e-06,
        1: 4.545454545454547e-06,
        9: 2.272727272727273e-05,
        10: 2.444938580832048e-05,
        11: 2.433490865073504e-05,
        50: 1.3750000000000002e-05,
        99: 2.50555119588552e-06,
        129: 2.5e-06,
    }
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
