"""The comparison of collectives in the run's store.

Guarantees: a rank that leaves or does not arrive is named to those that wait for it; a problem
found by one rank reaches ranks that wait elsewhere, with the collective they wait for; ranks of
different groups do not wait for each other; the store does not grow with the collectives.
"""

import asyncio

from paddle_vl.parallel.store.server import Section

SUM, GATHER = ("all_reduce", "a sum"), ("all_gather", "a gather")
NEVER = 30.0


def answers(*calls) -> list:
    """Results of the calls, all made concurrently."""

    async def run() -> list:
        return await asyncio.wait_for(asyncio.gather(*calls), NEVER)

    return asyncio.run(run())


def meetings(section, ranks, *plans, seconds=NEVER) -> list:
    """The ranks of a group meet, with the first plan or each with its own."""
    of_ranks = zip(ranks, plans or [SUM] * len(ranks), strict=True)
    return [section.meet(rank, ranks, *plan, seconds) for rank, plan in of_ranks]


def test_equal_plans_pass_and_the_store_does_not_grow():
    section = Section()
    for _ in range(5):
        assert answers(*meetings(section, (0, 1))) == [None, None]
        assert not section._plans
        assert len(section._last) == len(section._numbers) == 2
    assert answers(*[section.leave(rank, 2, NEVER) for rank in (0, 1)]) == [None, None]


def test_different_plans_are_found_by_all():
    found = answers(*meetings(Section(), (0, 1, 2), SUM, GATHER, SUM))
    assert set(found) == {
        "collective 1 of ranks [0, 1, 2]: the ranks are about to do different things: "
        "ranks 0, 2 a sum; rank 1 a gather"
    }


def test_a_rank_that_leaves_is_named_to_those_that_wait_for_it():
    section = Section()
    answers(*meetings(section, (0, 1)))
    found = answers(section.meet(0, (0, 1), *GATHER, NEVER), section.leave(1, 2, NEVER))
    problem = (
        "collective 2 of ranks [0, 1]: rank 0 is about to do a gather; rank 1 has left the checked "
        "section; its last collective: a sum, collective 1 of ranks [0, 1]"
    )
    assert found[0] == problem
    assert found[1].startswith(f"{problem} [rank 1 has left")


def test_a_rank_that_does_not_come_is_named():
    (found,) = answers(Section().meet(0, (0, 1), *SUM, 0.01))
    assert found == (
        "collective 1 of ranks [0, 1]: rank 0 is about to do a sum; rank 1 has not come within "
        "0.01 s; it reached none before"
    )


def test_groups_do_not_wait_for_each_other_and_hear_of_each_other_s_problems():
    section = Section()
    assert answers(*meetings(section, (0, 1))) == [None, None]
    found = answers(section.meet(3, (2, 3), *SUM, NEVER), *meetings(section, (0, 1), SUM, GATHER))
    assert "ranks are about to do different things: rank 0 a sum; rank 1 a gather" in found[0]
    assert found[0].endswith("[collective 1 of ranks [2, 3]: rank 3 is about to do a sum]")
