"""Full tensors from the shards that all ranks have, and shards from full parameters.

Each parameter's `ParamSpec` in its model's `ParameterTable` says how: shards are put together along
their axis, partial gradients are summed, replicas must be equal.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from paddle import Tensor, nn

from paddle_vl.checkpoint.reading import fill_parameters
from paddle_vl.checkpoint.rules import Same, StoredParameter
from paddle_vl.nn.linear import fused_columns, gradient_of
from paddle_vl.nn.parameter_table import joined_shards

# Replicas may differ by this much of their largest entry.
REPLICA_TOLERANCE = 1e-5


def copy_parameters(full: nn.Layer, model: nn.Layer) -> None:
    """Give a model under any placement its shards of the parameters of a single device's.

    Args:
        full, model: with `stored_parameters()`.
    """
    stored = {
        item.key: _Array(item.layout.to_stored(item.of_own(item.parameter.numpy())))
        for item in full.stored_parameters()
    }
    fill_parameters(model.stored_parameters(), stored)


class _Array(NamedTuple):
    """An array in the place of a checkpoint's tensor."""

    array: np.ndarray

    @property
    def dtype(self) -> str:
        return "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self, *, must_be_finite: bool = True) -> np.ndarray:
        return self.array


def gather_parameters(models: Sequence[nn.Layer]) -> dict[str, np.ndarray]:
    """Full values of all parameters of one model, by checkpoint key.

    Args:
        models: of all mp ranks, in order. A model without `stored_parameters()` needs a
            `placement`; its keys are parameter names.

    Returns:
        float32 arrays in the checkpoint's layout.

    Raises:
        AssertionError: replicas differ; names the parameter and the ranks.
        ValueError: the models have different parameters.
    """
    return _gathered(models, lambda parameter: parameter, sums_partial=False)


def gather_gradients(
    models: Sequence[nn.Layer], *, partial_are_summed: bool = False
) -> dict[str, np.ndarray]:
    """Full gradients of all parameters that have one on any rank; see `gather_parameters`.

    A replica without a gradient counts as zeros, as in the all-reduce of a run.

    Args:
        partial_are_summed: whether `sum_partial_gradients` ran, so that partial gradients are
            equal on all ranks already; otherwise they are summed here.

    Raises:
        AssertionError: as above, or some ranks have no gradient of a sharded parameter.
    """
    return _gathered(models, gradient_of, sums_partial=not partial_are_summed)


def _gathered(
    models: Sequence[nn.Layer], read: Callable[[Tensor], Tensor | None], sums_partial: bool
) -> dict[str, np.ndarray]:
    by_rank = [_stored_parameters(model) for model in models]
    keys = [[item.key for item in items] for items in by_rank]
    if any(other != keys[0] for other in keys):
        differing = sorted({key for other in keys for key in set(other) ^ set(keys[0])})
        raise ValueError(
            "the models have different parameters: "
            + (", ".join(differing) or "the same in another order")
            + "; give the models of all mp ranks of one run"
        )
    full = {}
    for items in zip(*by_rank, strict=True):
        tensors = [read(item.parameter) for item in items]
        if any(tensor is not None for tensor in tensors):
            array = _joined(items, tensors, sums_partial)
            full[items[0].key] = items[0].layout.to_stored(array)
    return full


def _joined(
    items: Sequence[StoredParameter], tensors: Sequence[Tensor | None], sums_partial: bool
) -> np.ndarray:
    first = items[0]
    spec = first.table[first.parameter]
    missing = [rank for rank, tensor in enumerate(tensors) if tensor is None]
    if missing and spec.split_axis is not None:
        raise AssertionError(
            f"{first.key}: ranks {missing} have no gradient of their shard, the others have"
        )
    arrays = [
        item.of_own(as_array(item.parameter if tensor is None else tensor) * (tensor is not None))
        for item, tensor in zip(items, tensors, strict=True)
    ]
    if len(arrays) == 1:
        return arrays[0]
    if spec.is_expert:
        raise ValueError(f"{first.key} is sharded over an expert-parallel group, not only over mp")
    if spec.is_table:
        return np.concatenate(arrays)
    if spec.split_axis is not None:
        if first.block is not None:
            spec = replace(spec, blocks=fused_columns(first.parameter)[first.block].blocks)
        return joined_shards(spec, arrays)
    if spec.has_partial_gradient and sums_partial:
        return np.sum(arrays, axis=0)
    largest = np.abs(arrays[0]).max(initial=0.0)
    for rank, array in enumerate(arrays):
        error = np.abs(array - arrays[0]).max(initial=0.0)
        if not error <= REPLICA_TOLERANCE * largest:
            raise AssertionError(
                f"{first.key} is replicated, but ranks 0 and {rank} differ by {error:.3g} "
                f"(largest entry {largest:.3g})"
            )
    return arrays[0]


def _stored_parameters(model: Any) -> list[StoredParameter]:
    if hasattr(model, "stored_parameters"):
        return list(model.stored_parameters())
    table = model.placement.parameter_table
    return [StoredParameter(name, x, Same(), table) for name, x in model.named_parameters()]


def as_array(tensor: Tensor) -> np.ndarray:
    """The values in float32, on the host."""
    return tensor.detach().astype("float32").numpy()
