"""Qwen3-VL's training on ranks: a run of the command line under each topology of `table` has the
losses and weights of one device, and so has one that continues it; under the same topology to the
bit."""

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
