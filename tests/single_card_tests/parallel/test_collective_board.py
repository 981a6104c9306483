"""The comparison of collectives in the run's store, with threads as ranks.

Guarantees: a rank that leaves or does not arrive is named to those that wait for it; a problem
found by one rank reaches ranks that wait elsewhere, with the collective they wait for; ranks of
different groups do not wait for each other; the store does not grow with the collectives.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

from paddle_vl.parallel.collective_check import Board

SUM, GATHER = ("all_reduce", "a sum"), ("all_gather", "a gather")
NEVER = 30.0


class Store:
    """What a board uses of Paddle's store."""

    def __init__(self):
        self.values, self.lock = {}, threading.Lock()

    def add(self, key, number):
        with self.lock:
            self.values[key] = self.values.get(key, 0) + number
            return self.values[key]

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]


def boards(number: int, timeout: float = NEVER) -> list[Board]:
    store = Store()
    return [Board(store, "test", rank, number, timeout) for rank in range(number)]


def answers(*calls) -> list:
    """Results of the calls, all made concurrently."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(*call) for call in calls]
        return [future.result(NEVER) for future in futures]


def meeting(ranks, board, plan=SUM):
    return board.meet, ranks, *plan


def test_equal_plans_pass_and_the_store_does_not_grow():
    own, sizes = boards(2), []
    for _ in range(5):
        assert answers(*[meeting((0, 1), board) for board in own]) == [None, None]
        sizes.append(len(own[0]._store.values))
    assert sizes[1:] == [sizes[1]] * 4
    assert answers(*[(board.leave,) for board in own]) == [None, None]


def test_different_plans_are_found_by_all():
    plans = (SUM, GATHER, SUM)
    pairs = zip(boards(3), plans, strict=True)
    found = answers(*[meeting((0, 1, 2), board, plan) for board, plan in pairs])
    assert set(found) == {
        "collective 1 of ranks [0, 1, 2]: the ranks are about to do different things: "
        "ranks 0, 2 a sum; rank 1 a gather"
    }


def test_a_rank_that_leaves_is_named_to_those_that_wait_for_it():
    first, second = boards(2)
    answers(meeting((0, 1), first), meeting((0, 1), second))
    found = answers(meeting((0, 1), first, GATHER), (second.leave,))
    problem = (
        "collective 2 of ranks [0, 1]: rank 0 is about to do a gather; rank 1 has left the checked "
        "section; its last collective: a sum, collective 1 of ranks [0, 1]"
    )
    assert found[0] == problem
    assert found[1].startswith(f"{problem} [rank 1 has left")


def test_a_rank_that_does_not_come_is_named():
    (found,) = answers(meeting((0, 1), boards(2, 0.01)[0]))
    assert found == (
        "collective 1 of ranks [0, 1]: rank 0 is about to do a sum; rank 1 has not come within "
        "0.01 s; it reached none before"
    )


def test_groups_do_not_wait_for_each_other_and_hear_of_each_other_s_problems():
    own = boards(4)
    assert answers(*[meeting((0, 1), board) for board in own[:2]]) == [None, None]
    found = answers(
        meeting((2, 3), own[3]), meeting((0, 1), own[0]), meeting((0, 1), own[1], GATHER)
    )
    assert "ranks are about to do different things: rank 0 a sum; rank 1 a gather" in found[0]
    assert found[0].endswith("[collective 1 of ranks [2, 3]: rank 3 is about to do a sum]")
