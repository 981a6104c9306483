"""The one error of the data path: a sample that cannot be used, where it stands, and why."""

from collections.abc import Iterator
from contextlib import contextmanager

# What reading a hostile line can raise beside BadSampleError: numbers beyond their type, brackets
# nested deeper than the stack, text that is no Unicode, paths that no file system takes.
# MemoryError is not among them: it says more about the machine than about the sample.
_HOSTILE = (ValueError, ArithmeticError, RecursionError, OSError)
# Reasons quote names that lines give, of which there may be a hundred thousand.
_LONGEST_REASON = 2000


class BadSampleError(ValueError):
    """A sample that cannot be used.

    Raised without a place by the code that finds the fault, and given one by the dataset, which
    knows the file and the line. Survives pickling, so a worker's error reaches the main process
    whole.

    Attributes:
        kind: short name of the fault (`broken_json`, `missing_image`, ...), for counting.
        reason: what was found, what was needed, what to do.
        place: `file:line`, or None while nobody has said.
    """

    def __init__(self, kind: str, reason: str, place: str | None = None):
        super().__init__(kind, reason, place)
        self.kind = kind
        self.reason = reason
        self.place = place

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}" if self.place else self.reason


@contextmanager
def sample_at(place: str) -> Iterator[None]:
    """Whatever is wrong with a sample within comes out as a `BadSampleError` with its place.

    The one place where faults that nobody foresaw become bad samples, so that none of them ends a
    run that skips bad samples. What is wrong with the machine (`RuntimeError`) passes.

    Args:
        place: `file:line`.
    """
    try:
        yield
    except BadSampleError as error:
        reason = error.reason
        if len(reason) > _LONGEST_REASON:
            reason = f"{reason[:_LONGEST_REASON]}... ({len(reason)} characters)"
        raise BadSampleError(error.kind, reason, place) from error
    except _HOSTILE as error:
        reason = f"the sample cannot be read: {type(error).__name__}: {str(error)[:200]}"
        raise BadSampleError("unreadable_sample", reason, place) from error
