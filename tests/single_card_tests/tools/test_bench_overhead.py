"""The overhead benchmark reports counts above the expected ones.

Guarantees: a report's read counts for its own step, although it happens in the next turn; an extra
read or collective, on logging steps or others, is a problem.
"""

import pytest

from overhead import expected_collectives, problems
from paddle_vl.parallel.collectives import BUCKET_ELEMENTS
from paddle_vl.parallel.recorder import Collective
from step_counts import TurnCounts, by_kind_of_step

LOGGING_STEPS = 3


def turns(reads: dict[int, int], collectives: dict[int, int]) -> list[TurnCounts]:
    """Steps 4 to 10; steps 6 and 9 log."""
    call = Collective("agreement", "all_gather", (0, 1), 8)
    return [
        TurnCounts(step, [call] * (3 + collectives.get(step, 0)), ["a:1"] * reads.get(step, 0), [])
        for step in range(4, 11)
    ]


def found(reads: dict[int, int], collectives: dict[int, int]) -> list[str]:
    counts = by_kind_of_step(turns(reads, collectives), LOGGING_STEPS)
    return problems({"counts": counts, "expected": expected_collectives(BUCKET_ELEMENTS, 2)})


def test_one_read_after_a_report_and_one_gather_on_it_are_expected():
    assert found({7: 1, 10: 1}, {6: 1, 9: 1}) == []


@pytest.mark.parametrize(
    ("reads", "collectives", "problem"),
    [
        ({5: 1}, {6: 1, 9: 1}, "1 host reads outside logging steps"),
        ({6: 1, 7: 1}, {6: 1, 9: 1}, "2 host reads on logging steps"),
        ({10: 2}, {6: 1, 9: 1}, "2 host reads on logging steps"),
        ({}, {6: 1, 8: 1, 9: 1}, "4 collectives outside logging steps, not 3"),
        ({}, {6: 1, 7: 1, 9: 1}, "4 collectives outside logging steps, not 3"),
        ({}, {6: 1, 9: 2}, "5 collectives on logging steps, not 4"),
        ({}, {}, "3 collectives on logging steps, not 4"),
    ],
)
def test_more_than_expected_is_a_problem(reads, collectives, problem):
    (said,) = found(reads, collectives)
    assert said.startswith(problem)


def test_buckets_are_counted_and_one_rank_sends_nothing():
    assert expected_collectives(BUCKET_ELEMENTS + 1, 4) == {"outside": 4, "on": 5}
    assert expected_collectives(BUCKET_ELEMENTS + 1, 1) == {"outside": 0, "on": 0}
