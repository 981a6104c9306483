"""Training of pi07's policy and planner, as in test_conversation_routes.py."""

import pytest

from tests.routes.runs import Routes
from tests.routes.table import POLICIES, Row


@pytest.mark.parametrize("row", POLICIES, ids=Row.named)
def test_losses_and_weights_are_those_of_one_device(routes: Routes, row: Row):
    routes.train(row)
