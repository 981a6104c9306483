"""Training of Qwen3-VL with experts and of Qwen3.5, as `table` says.

Guarantees: a run of the command line under each topology has the losses and the weights of one
device, and so has a run that continues it under another; under the same it has the same bits.
"""

import pytest

from tests.routes.runs import Routes
from tests.routes.table import FAMILIES, Row


@pytest.mark.parametrize("row", FAMILIES, ids=Row.named)
def test_losses_and_weights_are_those_of_one_device(routes: Routes, row: Row):
    routes.train(row)
