"""Type and range checks, and file names in OSErrors.

Guarantees: nothing is converted; one error lists all invalid values with their rules; an OSError
has its file name exactly once.
"""

import errno
from dataclasses import dataclass

import pytest

from paddle_vl.files.checked_values import Range, check_values
from paddle_vl.files.text_file import naming, shown


@dataclass(frozen=True)
class Settings:
    count: int = 1
    rate: float = 0.5
    flag: bool = False
    name: str = "a"
    sizes: list[int] = ()
    pair: tuple[float, float] = (1, 2.0)
    limit: int | None = None
    either: int | str = 3
    table: dict[str, int] | None = None


RANGES = {"count": Range(1, 1000), "rate": Range(0, 1, is_above=True), "sizes": Range(0)}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"count": 0}, "count is 0; it must be a whole number of at least 1 and at most 1,000"),
        ({"count": 1001}, "count is 1001"),
        ({"count": True}, "count is True"),
        ({"count": 1.0}, "count is 1.0"),
        ({"count": "1"}, "count is '1'"),
        ({"rate": 0}, "rate is 0; it must be a finite number above 0 and at most 1"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"rate": 10**400}, "rate is 1000"),
        ({"rate": False}, "rate is False"),
        ({"flag": 1}, "flag is 1; it must be true or false"),
        ({"name": None}, "name is None; it must be a text"),
        ({"sizes": [1, True]}, r"sizes is \[1, True\]; it must be a list of whole numbers"),
        ({"sizes": [-1]}, r"sizes is \[-1\]"),
        ({"sizes": 3}, "sizes is 3"),
        ({"pair": [1.0]}, r"pair is \[1.0\]; it must be a list of 2 finite numbers"),
        ({"limit": "x"}, "limit is 'x'; it must be a whole number"),
        ({"either": 1.5}, "either is 1.5; it must be a whole number or a text"),
        ({"table": [1]}, r"table is \[1\]; it must be an object"),
        ({"count": 0, "flag": 1}, "section: count is 0; .*; flag is 1"),
    ],
)
def test_values_that_do_not_fit_are_named(values, named):
    with pytest.raises(ValueError, match=named):
        check_values(Settings(**values), "section", RANGES)


def test_values_that_fit_pass():
    for values in ({}, {"rate": 1}, {"limit": 5}, {"either": "x"}, {"table": {"a": 1}}):
        check_values(Settings(**values), "section", RANGES)


def test_long_values_are_shortened():
    assert shown("a" * 500) == "'" + "a" * 76 + "..."
    assert shown(1 << 100_000) == "a int"


def test_os_errors_name_their_file_once():
    with pytest.raises(OSError, match="some/file") as error, naming("some/file"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert error.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="other") as error, naming("some/file"):
        raise FileNotFoundError(errno.ENOENT, "No such file", "other")
    assert "some/file" not in str(error.value)
