"""The benchmark of a step's overhead tells steps apart and notices what is too much.

Guarantees: a report's read belongs to its own step, made in the turn behind it; a read or a
collective too many, on logging steps or outside of them, is a problem, and so is a reference that
logs another training.
"""

import pytest

from bench_step_overhead import expected_collectives, problems
from paddle_vl.parallel.collectives import BUCKET_ELEMENTS
from paddle_vl.parallel.recorder import Collective
from step_counts import TurnCounts, by_kind_of_step

LOGGING_STEPS = 3


def turns(reads: dict[int, int], collectives: dict[int, int]) -> list[TurnCounts]:
    """Steps 4 to 10, of which 6 and 9 log."""
    call = Collective("agreement", "all_gather", (0, 1), 8)
    return [
        TurnCounts(step, [call] * (3 + collectives.get(step, 0)), ["a:1"] * reads.get(step, 0), [])
        for step in range(4, 11)
    ]


def found(
    reads: dict[int, int], collectives: dict[int, int], same_training: bool = True
) -> list[str]:
    counts = by_kind_of_step(turns(reads, collectives), LOGGING_STEPS, reads_later=True)
    expected = expected_collectives(BUCKET_ELEMENTS, 2)
    return problems(
        {"counts": {"after": counts}, "expected": expected, "same_training": same_training}
    )


def test_one_read_behind_a_report_and_one_gather_on_it_are_as_they_should_be():
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
def test_more_than_the_theory_is_a_problem(reads, collectives, problem):
    (said,) = found(reads, collectives)
    assert said.startswith(problem)


def test_another_training_is_a_problem():
    (said,) = found({7: 1, 10: 1}, {6: 1, 9: 1}, same_training=False)
    assert "do not log the same training" in said


def test_theory_counts_buckets_and_one_process_sends_nothing():
    assert expected_collectives(BUCKET_ELEMENTS + 1, 4) == {"outside": 4, "on": 5}
    assert expected_collectives(BUCKET_ELEMENTS + 1, 1) == {"outside": 0, "on": 0}
