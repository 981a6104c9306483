"""Tokens and documents that a run has trained on, by source of its mix.

Shapes: S sources.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from paddle_vl.files.checked_values import Count, checked, read_section
from paddle_vl.files.text_file import shown


@checked
class _Totals:
    """A state, see `SourceTotals.state_dict`."""

    names: list[str]
    tokens: list[Count]
    documents: list[Count]


class SourceTotals:
    """Counts of the whole run, the same on every rank; empty for data without sources.

    Args:
        data: the run's training data; of a mix it has `names` of the sources, and `documents` of
            each in an epoch.
    """

    def __init__(self, data: object):
        self._names = list(getattr(data, "names", ()))
        self._documents_in_epoch = list(getattr(data, "documents", ()))
        self._tokens, self._documents = ([0] * len(self._names) for _ in range(2))

    @property
    def passes(self) -> float | None:
        """Epochs of all sources together; None without sources."""
        total = sum(self._documents_in_epoch)
        return sum(self._documents) / total if total else None

    def add(self, tokens: Sequence[int], documents: Sequence[int]) -> None:
        """Add a step.

        Args:
            tokens, documents: `[S]` of all ranks; documents count in the step where they begin.
        """
        self._tokens = [a + b for a, b in zip(self._tokens, tokens, strict=True)]
        self._documents = [a + b for a, b in zip(self._documents, documents, strict=True)]

    def entries(self) -> dict[str, float]:
        """Entries of a metrics line."""
        line: dict[str, float] = {}
        for name, tokens, documents, in_epoch in zip(
            self._names, self._tokens, self._documents, self._documents_in_epoch, strict=True
        ):
            line[f"tokens/{name}"], line[f"documents/{name}"] = tokens, documents
            line[f"epochs/{name}"] = round(documents / in_epoch, 4)
        return line

    def state_dict(self) -> dict[str, Any]:
        """State that a checkpoint stores; JSON values."""
        return {"names": self._names, "tokens": self._tokens, "documents": self._documents}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state; None of a checkpoint without sources.

        Raises:
            ValueError: it is no state of these sources.
        """
        if state is None:
            return
        totals = read_section(_Totals, state, "sources")
        if totals.names != self._names or not (
            len(totals.tokens) == len(totals.documents) == len(self._names)
        ):
            raise ValueError(
                f"sources is {shown(dict(state))}; it must have a number of tokens and one of "
                f"documents of each of {self._names}"
            )
        self._tokens, self._documents = totals.tokens, totals.documents
