"""How a model's parameters are named and laid out in a checkpoint.

A rule pairs a parameter name with a checkpoint key, `*` standing for the same text in both, and
says how the array is laid out there. The first rule that fits a name holds, so special cases come
first. Reading and writing use the same rules.
"""

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from paddle import Tensor

from paddle_vl.nn.placement import SingleDevicePlacement


class ArrayLayout(Protocol):
    """A reversible change of layout between checkpoint and parameter."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape in the checkpoint of a parameter of `shape`."""

    def to_parameter(self, stored: np.ndarray) -> np.ndarray: ...

    def to_stored(self, value: np.ndarray) -> np.ndarray: ...


class Same:
    """The checkpoint's layout is the parameter's: embeddings, and heads `[vocab, dim]`."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def to_parameter(self, stored: np.ndarray) -> np.ndarray:
        return stored

    def to_stored(self, value: np.ndarray) -> np.ndarray:
        return value


class LinearWeights:
    """Matrices are `[out, in]` in the checkpoint and `[in, out]` here; vectors are as they are."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1]

    def to_parameter(self, stored: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(stored.T)

    def to_stored(self, value: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(value.T)


@dataclass(frozen=True)
class PatchKernel:
    """A convolution kernel `[out, *kernel]` that is a matrix `[prod(kernel), out]` here."""

    kernel: tuple[int, ...]

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[1], *self.kernel)

    def to_parameter(self, stored: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(stored.reshape(stored.shape[0], -1).T)

    def to_stored(self, value: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(value.T).reshape(self.stored_shape(value.shape))


@dataclass(frozen=True)
class Rule:
    """`parameter` and `key` are names with at most one `*`, standing for the same text."""

    parameter: str
    key: str
    layout: ArrayLayout


@dataclass(frozen=True)
class StoredParameter:
    """A parameter with its place in the checkpoint."""

    key: str
    parameter: Tensor
    layout: ArrayLayout
    placement: SingleDevicePlacement

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in the checkpoint, where the parameter is whole."""
        return self.layout.stored_shape(self.placement.whole_shape(self.parameter))

    def from_stored(self, stored: np.ndarray) -> np.ndarray:
        """The checkpoint's array as this rank's parameter has it."""
        return self.placement.own_part(self.parameter, self.layout.to_parameter(stored))


def place_parameters(
    named_parameters: Iterable[tuple[str, Tensor]],
    rules: tuple[Rule, ...],
    placement: SingleDevicePlacement,
) -> list[StoredParameter]:
    """Every parameter with its checkpoint key, in the model's order.

    Raises:
        ValueError: a parameter that no rule covers.
    """
    placed = []
    for name, parameter in named_parameters:
        rule = next((rule for rule in rules if fnmatch.fnmatchcase(name, rule.parameter)), None)
        if rule is None:
            raise ValueError(f"no checkpoint rule covers parameter {name}")
        wildcard = re.fullmatch(re.escape(rule.parameter).replace(r"\*", "(.*)"), name)
        key = rule.key.replace("*", wildcard.group(1)) if wildcard.groups() else rule.key
        placed.append(StoredParameter(key, parameter, rule.layout, placement))
    return placed
