"""The limit of gloo's waits, and that another Paddle is refused by name.

Guarantees: what the limit is set through exists in the Paddle that is installed; where a symbol is
missing, or objects are not as known, the error names it and the version; the limit cannot change
once the processes have met. That it holds is tested in multi_card_tests/test_pauses.py.
"""

import pytest

from paddle_vl.parallel.gloo_fleet import time_limit
from paddle_vl.parallel.store import rendezvous


def test_paddles_libraries_have_what_it_takes():
    library = time_limit.check_library()
    assert library.context > 0
    assert library.communicator > 0
    assert library.manager > 0


def test_a_missing_symbol_is_named(monkeypatch):
    monkeypatch.setitem(time_limit._SYMBOLS, "limit", "_ZN4gloo7Context9getSecondsEv")
    time_limit.check_library.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"paddlepaddle 3.*no _ZN4gloo7Context9getSeconds"):
            time_limit.check_library()
    finally:
        time_limit.check_library.cache_clear()


def test_a_group_that_was_not_made_is_refused():
    with pytest.raises(RuntimeError, match="no communicator of group 4321.*adapt paddle_vl"):
        time_limit.limit_waits(4321, 0, 2, 60)


def test_addresses_that_are_none_are_no_objects():
    for address in (0, 8, 1 << 47, 1 << 63):
        assert not time_limit._is_object(address, 1)


def test_the_limit_cannot_change_once_processes_have_met(monkeypatch):
    monkeypatch.setattr(rendezvous, "_timeout_s", [60.0])
    monkeypatch.setattr(rendezvous, "_met", [None])
    rendezvous.limit_waits(60)
    with pytest.raises(RuntimeError, match="met with a limit of 60 s .* cannot become 61 s"):
        rendezvous.limit_waits(61)
