"""Training of Qwen3-VL with experts, Qwen3.5, Qwen4-Exp and PaddleOCR-VL, as in
test_conversation_routes.py."""

import pytest

from tests.routes.runs import Routes
from tests.routes.table import FAMILIES, Row


@pytest.mark.parametrize("row", FAMILIES, ids=Row.named)
def test_losses_and_weights_are_those_of_one_device(routes: Routes, row: Row):
    routes.train(row)
