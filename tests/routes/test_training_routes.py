import pytest

from tests.routes.table import TRAINING, Row


@pytest.mark.parametrize("row", TRAINING, ids=lambda row: f"{row.run}: {row.topology}")
def test_losses_and_weights_are_those_of_one_device(routes, row: Row):
    routes.train(row)
    print("SECONDS", routes.seconds)
