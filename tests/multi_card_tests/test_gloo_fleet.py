"""Paddle's collectives and fleet on CPU processes, with the gaps of its gloo backend filled.

Guarantees, at 2 and at 4 processes: every collective gives what NumPy gives, for each operation,
dtype, stride and size and in the variants that fleet calls; messages between two members of a
larger group leave its later collectives in step, and both directions may be sent at once; groups
that ranks make at the same time all work; fleet's tensor-parallel primitives and layers give a
plain computation's results and gradients.

A launch of a few seconds runs all checks of one number of processes; a check, in `gloo_checks`,
makes its own assertions in every rank.
"""

import pytest

from tests.multi_card_tests.gloo_checks import (  # noqa: F401 - importing enters their checks
    collectives,
    messages,
    tensor_parallel,
)
from tests.multi_card_tests.gloo_checks.registry import (
    CHECKS,
    size_asked_for,
    start_fleet,
)
from tests.support.launch import launch, outcome_of, run_checks


def collectives_worker() -> dict:
    degrees = {"dp_degree": size_asked_for() // 2, "mp_degree": 2, "pp_degree": 1}
    start_fleet(degrees)
    return run_checks(CHECKS)


@pytest.fixture(scope="module", params=[2, 4], ids=["2_processes", "4_processes"])
def outcomes(request):
    return launch(collectives_worker, processes=request.param)


@pytest.mark.parametrize("name", CHECKS)
def test_on_processes(outcomes, name):
    outcome_of(outcomes, name)
