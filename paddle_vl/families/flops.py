"""Floating point operations of the matrix products of a model, forward and backward.

A multiply-add is two operations. Matrix products are all that is counted, as is usual for the use
of a device (MFU): norms, activations, softmax, rotary positions and look-ups are left out, and so
is what recomputation does a second time.

Where the usual formula takes three forward passes for a step, each product here has the backward
that its place in the graph asks for: as many operations again for the gradient of its input if
anything before it is trained, and as many for that of its weight if this is trained.

Source: PaLM (Chowdhery et al. 2022), appendix B; Narayanan et al. 2021 (Megatron-LM), section 5.1,
which both count whole score matrices for causal attention: here it has the visible half.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping
from copy import copy
from typing import Any

import numpy as np


class Operations:
    """The products of a graph, by what they grow with, written down from its inputs to its losses.

    The methods return whether a gradient passes what comes out, and take whether one passes what
    goes in.

    Args:
        trained: names of the parameters that are trained; None for all.
        ranks: of the low-rank adapters, by the module that they are beside.

    Attributes:
        forward, backward: operations for one of each unit (a token, a pair of tokens, ...).
    """

    def __init__(self, trained: Collection[str] | None = None, ranks: Mapping[str, int] = {}):
        self._trained, self._ranks = trained, dict(ranks)
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()

    def without_backward(self) -> "Operations":
        """For what no loss takes in: its forward is counted here, its backward nowhere."""
        other = copy(self)
        other.backward = Counter()
        return other

    def trains(self, *names: str) -> bool:
        """Whether any of these parameters is trained."""
        return any(self._trained is None or name in self._trained for name in names)

    def norm(self, module: str, carries: bool) -> bool:
        """A norm: nothing is counted, but its parameters may be where a gradient begins."""
        return carries or self.trains(f"{module}.weight", f"{module}.bias")

    def matrix(self, unit: str, weight: str, size: int, carries: bool) -> bool:
        """Rows times a matrix of so many entries that each row meets."""
        trains = self.trains(weight)
        self.forward[unit] += 2 * size
        self.backward[unit] += 2 * size * (carries + trains)
        return carries or trains

    def linear(self, unit: str, module: str, inputs: int, outputs: int, carries: bool) -> bool:
        """Rows through a linear, and through the adapter beside it if there is one."""
        out = self.matrix(unit, f"{module}.weight", inputs * outputs, carries)
        if rank := self._ranks.get(module):
            inner = self.matrix(unit, f"{module}.lora_A.weight", inputs * rank, carries)
            out |= self.matrix(unit, f"{module}.lora_B.weight", rank * outputs, inner)
        return out or self.trains(f"{module}.bias")

    def attention(self, unit: str, width: int, query: bool, key: bool, value: bool) -> bool:
        """Scores and the values they weigh, of pairs of tokens that see each other.

        Args:
            width: of all heads together.
            query, key, value: whether a gradient passes these.
        """
        self.forward[unit] += 4 * width
        self.backward[unit] += 2 * width * ((query or key) + query + key + value)
        return query or key or value


class FlopCounter(ABC):
    """The operations of a step for a batch, of its real tokens and patches alone: padding is work
    that is done for nothing.

    They are those of the whole model, whatever part of it a process holds.
    """

    def __call__(self, batch: Mapping[str, Any]) -> int:
        """Forward and backward of a batch of arrays, as a collator makes it."""
        units, operations = self.units(batch), self.operations(batch)
        return _total(operations.forward, units) + _total(operations.backward, units)

    def forward(self, batch: Mapping[str, Any]) -> int:
        """Forward alone."""
        return _total(self.operations(batch).forward, self.units(batch))

    @abstractmethod
    def units(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """How many of each unit a batch has."""

    @abstractmethod
    def operations(self, batch: Mapping[str, Any]) -> Operations:
        """What one of each unit costs."""


def causal_pairs(lengths: np.ndarray) -> int:
    """Of tokens that see themselves and what is before them, in sequences of these lengths."""
    lengths = np.asarray(lengths, dtype=np.int64)
    return int((lengths * (lengths + 1) // 2).sum())


def _total(operations: Mapping[str, int], units: Mapping[str, int]) -> int:
    return sum(cost * units[unit] for unit, cost in operations.items())
