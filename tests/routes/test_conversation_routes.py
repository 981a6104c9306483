"""Qwen3-VL's training on ranks, as `table` says.

Guarantees: a run of the command line under each topology has the losses and the weights of one
device, and so has a run that continues it under another; under the same topology it has the same
bits.
"""

import pytest

from tests.routes.runs import Routes
from tests.routes.table import CONVERSATIONS, HEAVY, Row


@pytest.mark.parametrize(
    "row",
    [*CONVERSATIONS, *(pytest.param(row, marks=pytest.mark.heavy) for row in HEAVY)],
    ids=Row.named,
)
def test_losses_and_weights_are_those_of_one_device(routes: Routes, row: Row):
    routes.train(row)
