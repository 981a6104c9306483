"""What the tests of the doctor share."""

import pytest

from paddle_vl.doctor.check import Machine


@pytest.fixture
def machine(tmp_path) -> Machine:
    """A CPU, with small sizes."""
    return Machine("cpu", 0, False, True, tmp_path)
