"""Learning rate per step.

Guarantees: HF's cosine with a floor and its constant schedule, both after a linear warmup from 0;
the oracle is the formula of HF's lambda written out for single steps.
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
