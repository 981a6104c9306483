"""Training of pi07's policy and planner, as `table` says.

Guarantees: a run of the command line under each topology has the losses and the weights of one
device, and so has a run that continues it under another; under the same it has the same bits.
"""

import pytest

from tests.routes.runs import Routes
from tests.routes.table import POLICIES, Row


@pytest.mark.parametrize("row", POLICIES, ids=Row.named)
def test_losses_and_weights_are_those_of_one_device(routes: Routes, row: Row):
    routes.train(row)
