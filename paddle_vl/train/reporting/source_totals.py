"""Tokens and documents that a run has trained on, by source of its mix.

Shapes: S sources.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class HasSources(Protocol):
    """Training data of several sources.

    Attributes:
        names: of the sources.
        documents: `[S]` documents of each source in an epoch.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def documents(self) -> Sequence[int]: ...


class SourceTotals:
    """Counts of the whole run, the same on every rank; empty for data without sources.

    Args:
        data: the run's training data.
    """

    def __init__(self, data: object):
        has_sources = isinstance(data, HasSources)
        self._names = list(data.names) if has_sources else []
        self._documents_in_epoch = list(data.documents) if has_sources else []
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
        """Continue from a state; None of a checkpoint without sources."""
        if self._names and state is not None:
            self._tokens, self._documents = list(state["tokens"]), list(state["documents"])
