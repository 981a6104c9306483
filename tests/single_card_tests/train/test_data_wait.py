"""Warnings about long waits for data.

Guarantees: a short wait logs nothing; a longer one logs what is awaited, again at doubled
intervals, and once when it ends without an error; watched batches are those of the data, and only
waits for them count.
"""

import itertools
import logging
import threading

import pytest

from paddle_vl.train.feeding.feed import logger, warning_of_wait, watched

AFTER_S = 0.01


class Seen(logging.Handler):
    """Ends a wait after this many warnings."""

    def __init__(self, count: int):
        super().__init__()
        self.messages, self._count, self.enough = [], count, threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if len(self.messages) == self._count:
            self.enough.set()


@pytest.fixture
def seen():
    handler = Seen(2)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_a_long_wait_says_what_for_at_doubling_times_and_when_it_is_over(seen):
    names = itertools.chain(["batch 3"], itertools.repeat("batch 3, a sample further"))
    before = set(threading.enumerate())
    with warning_of_wait(AFTER_S, lambda: next(names), "step 7"):
        seen.enough.wait()
    assert set(threading.enumerate()) == before
    first, second, last = seen.messages[:2] + seen.messages[-1:]
    assert first == "step 7 has waited 0.01 s for data: batch 3"
    assert second == "step 7 has waited 0.02 s for data: batch 3, a sample further"
    assert last.startswith("step 7 goes on: its data came after 0.")


def test_a_wait_that_is_over_in_time_says_nothing(seen):
    with warning_of_wait(1000.0, lambda: pytest.fail("asked"), "step 1"):
        pass
    assert not seen.messages


def test_a_wait_that_fails_does_not_go_on(seen):
    def fail():
        seen.enough.wait()
        raise KeyError

    with pytest.raises(KeyError), warning_of_wait(AFTER_S, lambda: "it", "it"):
        fail()
    assert not any("goes on" in message for message in seen.messages)


def test_watched_batches_are_the_datas_and_each_is_waited_for(seen):
    class Data:
        def __iter__(self):
            yield 0
            seen.enough.wait()
            yield 1

        def waiting_for(self) -> str:
            return "the second"

    before = set(threading.enumerate())
    assert list(watched(Data(), AFTER_S, "it")) == [0, 1]
    assert seen.messages[0] == "it has waited 0.01 s for data: the second"
    assert set(threading.enumerate()) == before


def test_what_is_done_with_a_batch_is_no_wait(seen):
    class Data:
        waiting_for = None

        def __iter__(self):
            return iter([0, 1])

    for _ in watched(Data(), AFTER_S, "it"):
        # Long enough for a warning if it were a wait.
        seen.enough.wait(3 * AFTER_S)
    assert not seen.messages
