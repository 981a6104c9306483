"""The board of the collective check, with threads as ranks.

Guarantees: a rank that ends or does not arrive is named to those that wait for it; a problem found
by one rank reaches ranks that wait elsewhere, with the collective they wait for; ranks of different
groups do not wait for each other; the board drops collectives that all ranks have passed.
"""

from concurrent.futures import ThreadPoolExecutor

from paddle_vl.parallel.collective_board import Board, Plan

SUM, GATHER = Plan(("all_reduce", (3,)), "a sum"), Plan(("all_gather", (3,)), "a gather")
NEVER = 30.0


def answers(*calls) -> list[str | None]:
    """Results of the calls, all made concurrently."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(*call) for call in calls]
        return [future.result(NEVER) for future in futures]


def test_equal_plans_pass_and_are_forgotten():
    board = Board(2, NEVER)
    for _ in range(3):
        assert answers(*[(board.meet, rank, (0, 1), SUM) for rank in range(2)]) == [None, None]
    assert answers((board.leave, 0), (board.leave, 1)) == [None, None]
    assert not board._plans
    assert not board._passed


def test_different_plans_are_found_by_all():
    board = Board(3, NEVER)
    plans = (SUM, GATHER, SUM)
    found = answers(*[(board.meet, rank, (0, 1, 2), plans[rank]) for rank in range(3)])
    assert set(found) == {
        "collective 1 of ranks [0, 1, 2]: the ranks are about to do different things: "
        "ranks 0, 2 a sum; rank 1 a gather"
    }


def test_a_rank_that_ends_is_named_to_those_that_wait_for_it():
    board = Board(4, NEVER)
    answers(*[(board.meet, rank, (0, 1), SUM) for rank in range(2)])
    found, _ = answers((board.meet, 0, (0, 1), GATHER), (board.lose, 1))
    assert found == (
        "collective 2 of ranks [0, 1]: rank 0 is about to do a gather; rank 1 has ended; its last "
        "collective: a sum, collective 1 of ranks [0, 1]"
    )
    board = Board(4, NEVER)
    board.lose(1)
    assert answers(*[(board.meet, rank, (2, 3), SUM) for rank in (2, 3)]) == [None, None]
    (found,) = answers((board.leave, 0))
    assert found.endswith("rank 1 has ended; it reached none before")


def test_a_rank_that_has_left_may_end():
    board = Board(2, NEVER)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(board.leave, 0)
        while 0 not in board._gone:
            pass
        board.lose(0)
        assert board.leave(1) is None
        assert first.result(NEVER) is None


def test_a_rank_that_does_not_come_is_named():
    (found,) = answers((Board(2, 0.01).meet, 0, (0, 1), SUM))
    assert found == (
        "collective 1 of ranks [0, 1]: rank 0 is about to do a sum; rank 1 has not come within "
        "0.01 s; it reached none before"
    )


def test_groups_do_not_wait_for_each_other_and_hear_of_each_other_s_problems():
    board = Board(4, NEVER)
    assert answers(*[(board.meet, rank, (0, 1), SUM) for rank in (0, 1)]) == [None, None]
    found = answers(
        (board.meet, 3, (2, 3), SUM),
        (board.meet, 0, (0, 1), SUM),
        (board.meet, 1, (0, 1), GATHER),
    )
    assert "ranks are about to do different things: rank 0 a sum; rank 1 a gather" in found[0]
    assert found[0].endswith("[collective 1 of ranks [2, 3]: rank 3 is about to do a sum]")
