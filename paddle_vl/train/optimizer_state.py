"""State of the optimizer by HF name: what a checkpoint has of it.

Paddle names optimizer state by counters that differ between runs and ranks, so state is looked up
by parameter.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.checkpoint.ranges import ShardedValue
from paddle_vl.checkpoint.safetensors_io import TensorToWrite, check_finite
from paddle_vl.nn.flat_buckets import AVERAGE, POWERS, STATES, FlatBucket
from paddle_vl.nn.linear import fused_columns
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.nn.parameter_table import ParameterTable, Saved
from paddle_vl.parallel.sharding import FleetSharding
from paddle_vl.train.freeze import NamedParameters

_MASTER = "master_weight"


class OptimizerState:
    """Base of `Optimizer`, which sets the attributes: saves and loads its state."""

    parameters: NamedParameters
    trained_names: set[str]
    store: ParameterStore
    # Each parameter once, and its HF names.
    _named: list[tuple[Tensor, list[str]]]
    _table: ParameterTable
    # Paddle's optimizer, whose state has names of its own.
    _adamw: Any
    _fleet: FleetSharding | None
    _buckets: list[FlatBucket]
    # Bucket of an updated tensor and number in it, by identity.
    _place: dict[int, tuple[FlatBucket, int]]
    # Moving average of each updated tensor that is in no bucket, by identity; None without them.
    _averages: dict[int, Tensor] | None

    def state_tensors(self) -> dict[str, Tensor]:
        """The live state tensors by `HF name/state`; a fused parameter's under each of its names.

        Moments have the shape of the updated tensor.
        """
        return {
            f"{name}/{state}": tensor
            for names, state, _, tensor in self._states()
            if tensor is not None
            for name in names
        }

    def state_to_write(self) -> list[TensorToWrite]:
        """All state, of unsharded values."""
        states = [state for state in self._states() if self._table[state[2]].joins_saving]
        # By id() of a parameter and the name of one of its scalar states.
        powers = {(id(p), state): t for _, state, p, t in states if not _has_layout(state)}
        if self._fleet is not None and powers:
            powers = self._fleet.numbers_of_all(powers)

        def number(key: tuple[int, str]) -> np.ndarray:
            found = powers[key]
            assert found is not None, "the all-reduce gives every rank all of them"
            return found.numpy()

        tensors = []
        for names, state, parameter, tensor in states:
            is_joined = self._table[parameter].saved is Saved.JOINED
            if not _has_layout(state):
                make = partial(number, (id(parameter), state))
                tensors += [
                    TensorToWrite(f"{name}/{state}", (1,), "F32", make, is_joined=is_joined)
                    for name in names
                ]
                continue
            # None where other ranks have all of the parameter.
            own = paddle.zeros([0]) if tensor is None else tensor
            source = ShardedValue(self._table, parameter, self.store, own)
            tensors += [
                TensorToWrite(
                    f"{name}/{state}",
                    shape,
                    "F32",
                    is_joined=is_joined,
                    source=source,
                    block=None if len(names) == 1 else block,
                    keeps_rows=True,
                )
                for block, (name, shape) in enumerate(
                    zip(names, self._shapes(parameter, names), strict=True)
                )
            ]
        return tensors

    def _states(self) -> Iterator[tuple[list[str], str, Tensor, Tensor | None]]:
        """HF names of a parameter, name of a state, the parameter, and the live state tensor.

        The tensor is None if other ranks have all of it.
        """
        for parameter, names in self._named:
            updated = self.store.shard_of(parameter)
            for state in STATES if self._averages is None else (*STATES, AVERAGE):
                tensor = None
                if updated is not None and id(updated) in self._place:
                    bucket, number = self._place[id(updated)]
                    tensor = bucket.state(number, state)
                elif updated is not None and state == AVERAGE and self._averages is not None:
                    tensor = self._averages[id(updated)]
                elif updated is not None:
                    tensor = self._adamw._get_accumulator_master(state, updated)
                yield names, state, parameter, tensor
            if parameter.dtype != paddle.float32:
                yield names, _MASTER, parameter, updated

    def _shapes(self, parameter: Tensor, names: list[str]) -> list[tuple[int, ...]]:
        """Full shapes under each of the parameter's names."""
        full = self._table.full_shape(parameter)
        if len(names) == 1:
            return [full]
        return [(full[0], columns.width) for columns in fused_columns(parameter)]

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set all state, bit for bit; arrays are read one at a time.

        Raises:
            ValueError: every missing and unexpected entry, or every misshapen one.
        """
        names = {f"{name}/{state}" for names, state, _, _ in self._states() for name in names}
        own_names = {name for name, _ in self.parameters}
        elsewhere = {
            name for name in arrays if name.rpartition("/")[0] in self.trained_names - own_names
        }
        problems = [f"missing {name}" for name in sorted(names - arrays.keys())]
        problems += [f"unexpected {name}" for name in sorted(arrays.keys() - names - elsewhere)]
        if not problems:
            for names_of_one, state, parameter, tensor in self._states():
                problems += self._load(names_of_one, state, parameter, tensor, arrays)
        if problems:
            raise ValueError(
                "the saved optimizer state belongs to other trained parameters: "
                + "; ".join(problems)
            )
        powers = {
            id(self.store.shard_of(parameter)): {
                power: float(arrays[f"{names[0]}/{power}"][0]) for power in POWERS
            }
            for parameter, names in self._named
        }
        for bucket in self._buckets:
            bucket.set_powers([powers[id(tensor)] for tensor in bucket.tensors])

    def _load(
        self,
        names: list[str],
        state: str,
        parameter: Tensor,
        tensor: Tensor | None,
        arrays: Mapping[str, np.ndarray],
    ) -> list[str]:
        """Set one state from the arrays of all of the parameter's names; returns problems."""
        found = {f"{name}/{state}": arrays[f"{name}/{state}"] for name in names}
        shapes = self._shapes(parameter, names) if _has_layout(state) else [(1,)] * len(names)
        problems = [
            f"{name} is {list(array.shape)}, not {list(shape)}"
            for (name, array), shape in zip(found.items(), shapes, strict=True)
            if array.shape != shape
        ]
        slices = [*found.values()]
        if not _has_layout(state) and len({array.tobytes() for array in slices}) > 1:
            problems.append(f"{', '.join(found)} differ, of linears that are trained as one")
        if problems or tensor is None:
            return problems
        if not _has_layout(state):
            array = np.array(slices[0])
        else:
            array = self._own_values(parameter, tensor, slices)
            check_finite(array.reshape(-1), f"the saved optimizer state {', '.join(found)}")
        # Tensors of a bucket share their powers.
        if _has_layout(state) or not self._buckets:
            tensor.set_value(array)
        return []

    def _own_values(
        self, parameter: Tensor, tensor: Tensor, slices: list[np.ndarray]
    ) -> np.ndarray:
        """This rank's share of the full value, of which it uses no other rows; in the shape of the
        state, padded with zeros.

        Args:
            slices: columns of each linear of a fused parameter, or the full value.
        """
        spans, _, rank = self.store.spread(parameter, tensor)
        begin, end = (0, parameter.size) if spans is None else spans[rank]
        width = math.prod(parameter.shape[1:])
        rows = slice(begin // width, max(-(-end // width), begin // width))
        if len(slices) > 1:
            full = np.concatenate([columns[rows] for columns in slices], axis=1)
            own = self._table.own_shard(parameter, full)
        else:
            own = np.atleast_1d(self._table.own_shard(parameter, slices[0]))[rows]
        values = np.zeros([tensor.size], own.dtype)
        first = rows.start * width
        values[: max(end - begin, 0)] = own.reshape(-1)[begin - first : end - first]
        return values.reshape(tensor.shape)


def _has_layout(state: str) -> bool:
    """Whether a state has the parameter's shape; the powers of beta are single numbers."""
    return not state.endswith("_pow_acc")
