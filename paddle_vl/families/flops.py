"""Floating point operations of the matrix products of a model, forward and backward.

A multiply-add is two operations. As usual for model FLOPs utilization (MFU), only matrix products
count: no norms, activations, softmax, rotary positions, look-ups, and no activation recomputation.

The usual formula takes three forward passes for a step. Here the backward of a product counts as
much as its forward for the gradient of its input, if anything before it is trained, and as much
again for the gradient of its weight, if that is trained.

Source: PaLM (Chowdhery et al. 2022), appendix B; Narayanan et al. 2021 (Megatron-LM), section 5.1.
Differs: both count full score matrices for causal attention; here only the visible half counts.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping
from copy import copy
from typing import Any

import numpy as np


class Operations:
    """Operations of a graph per unit (token, pair of tokens, ...), added from inputs to losses.

    Methods take whether a gradient flows into their input (`carries`) and return whether one flows
    into their output.

    Args:
        trained: names of the trained parameters; None for all.
        ranks: LoRA ranks by adapted module.

    Attributes:
        forward, backward: operations by unit, of all views together.
    """

    def __init__(self, trained: Collection[str] | None = None, ranks: Mapping[str, int] = {}):
        self._trained, self._ranks = trained, dict(ranks)
        self._unit, self._inside = "", ""
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()

    def at(self, unit: str, module: str = "") -> "Operations":
        """A view that counts per this unit, and names what is inside this module."""
        other = copy(self)
        other._unit, other._inside = unit, f"{module}." if module else ""
        return other

    def without_backward(self) -> "Operations":
        """A view that counts forward operations only, for products that no loss uses."""
        other = copy(self)
        other.backward = Counter()
        return other

    def trains(self, *names: str) -> bool:
        """Whether any of these parameters is trained."""
        return self._trained is None or any(f"{self._inside}{n}" in self._trained for n in names)

    def norm(self, name: str, carries: bool) -> bool:
        """A norm: counts nothing, but a gradient begins here if its parameters are trained."""
        return carries or self.trains(f"{name}.weight", f"{name}.bias")

    def matrix(self, weight: str, size: int, carries: bool) -> bool:
        """A product with a weight of `size` entries, each used once per unit."""
        trains = self.trains(weight)
        self.forward[self._unit] += 2 * size
        self.backward[self._unit] += 2 * size * (carries + trains)
        return carries or trains

    def linear(self, name: str, inputs: int, outputs: int, carries: bool) -> bool:
        """A linear, with its low-rank adapter if it has one."""
        out = self.matrix(f"{name}.weight", inputs * outputs, carries)
        if rank := self._ranks.get(f"{self._inside}{name}"):
            inner = self.matrix(f"{name}.lora_A.weight", inputs * rank, carries)
            out |= self.matrix(f"{name}.lora_B.weight", rank * outputs, inner)
        return out or self.trains(f"{name}.bias", f"{name}.lora_magnitude_vector")

    def mlp(self, name: str, width: int, inner: int, carries: bool) -> bool:
        """`down_proj(act(gate_proj(x)) * up_proj(x))`."""
        gate = self.linear(f"{name}.gate_proj", width, inner, carries)
        up = self.linear(f"{name}.up_proj", width, inner, carries)
        return self.linear(f"{name}.down_proj", inner, width, gate or up)

    def attention(self, pairs: str, width: int, query: bool, key: bool, value: bool) -> bool:
        """Attention scores and weighted values per pair of tokens that attend to each other.

        Args:
            pairs: the unit.
            width: of all heads together.
            query, key, value: whether a gradient flows into these.
        """
        self.forward[pairs] += 4 * width
        self.backward[pairs] += 2 * width * ((query or key) + query + key + value)
        return query or key or value


class FlopCounter(ABC):
    """Operations of the full model for a batch, without padding; the same on every rank."""

    def __call__(self, batch: Mapping[str, Any]) -> int:
        """Operations of the forward and backward pass of a collator's batch."""
        units, found = self.units(batch), self.operations(batch)
        return _total(found.forward, units) + _total(found.backward, units)

    def forward(self, batch: Mapping[str, Any]) -> int:
        """Operations of the forward pass alone."""
        return _total(self.operations(batch).forward, self.units(batch))

    @abstractmethod
    def units(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Number of each unit in a batch."""

    @abstractmethod
    def operations(self, batch: Mapping[str, Any]) -> Operations:
        """Operations per unit."""


def _total(operations: Mapping[str, int], units: Mapping[str, int]) -> int:
    return sum(cost * units[unit] for unit, cost in operations.items())


def causal_pairs(lengths: np.ndarray) -> int:
    """Pairs (query, key) of causal attention in sequences of these lengths."""
    lengths = np.asarray(lengths, dtype=np.int64)
    return int((lengths * (lengths + 1) // 2).sum())
