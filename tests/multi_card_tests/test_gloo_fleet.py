"""A run's collectives and fleet's layers on CPU ranks, with patched gloo groups.

Guarantees, on 4 ranks: every collective equals NumPy, for each operation, dtype, stride and
size; messages between two ranks of a larger group do not block its later collectives, and both
directions may be sent at once; groups that ranks create at the same time all work; fleet's
tensor-parallel primitives give the results and gradients of a plain computation.

One launch runs all checks of `gloo_checks`; they assert on every rank.
"""

import pytest

from tests.multi_card_tests.gloo_checks import (  # noqa: F401 - importing registers their checks
    collectives,
    messages,
    tensor_parallel,
)
from tests.multi_card_tests.gloo_checks.registry import CHECKS, start_fleet
from tests.support.launch import launch, outcome_of, run_checks


def collectives_worker() -> dict:
    start_fleet({"dp_degree": 2, "mp_degree": 2, "pp_degree": 1})
    return run_checks(CHECKS)


@pytest.fixture(scope="module")
def outcomes():
    return launch(collectives_worker, processes=4)


@pytest.mark.parametrize("name", CHECKS)
def test_check(outcomes, name):
    outcome_of(outcomes, name)
