"""Full values of what an optimizer updates, and gradients, on every rank."""

from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.nn.linear import whole_slices
from paddle_vl.parallel.collectives import all_gathered
from paddle_vl.train.colocated_optimizer import ColocatedOptimizer
from paddle_vl.train.optimizer import Optimizer


@paddle.no_grad()
def gathered(store: Any, parameter: Tensor, value: Tensor) -> Tensor:
    """A value that is sharded like a parameter, such as its gradient, in the parameter's shape."""
    spans, own, rank = store.spread(parameter, value)
    if spans is None:
        return own()
    lengths = [max(end - begin, 0) for begin, end in spans]
    padded = paddle.zeros([max(lengths)], dtype=value.dtype)
    if lengths[rank]:
        padded[: lengths[rank]] = own().detach().reshape([-1])[: lengths[rank]]
    if len(spans) > 1:
        padded = all_gathered(padded, store._group_of(parameter))
    rows = padded.reshape([len(spans), -1])
    parts = [row[:length] for row, length in zip(rows, lengths, strict=True) if length]
    return paddle.concat(parts).reshape(parameter.shape)


def states_of(optimizer: Optimizer) -> dict[str, np.ndarray]:
    """Copies of all state, unsharded, by the names of `state_to_write`; collective where it is
    sharded."""
    if isinstance(optimizer, ColocatedOptimizer):
        return {k: v for each in optimizer.optimizers for k, v in states_of(each).items()}
    table, store = optimizer._table, optimizer.store
    # Numbers, which are in no source.
    found = {
        tensor.name: tensor.produce().copy()
        for tensor in optimizer.state_to_write()
        if tensor.source is None
    }
    for names, state, parameter, tensor in optimizer._states():
        if f"{names[0]}/{state}" in found:
            continue
        own = paddle.zeros([0]) if tensor is None else tensor
        full = table.full_value(parameter, gathered(store, parameter, own))
        columns = whole_slices(parameter) if len(names) > 1 else [slice(None)]
        for name, of_name in zip(names, columns, strict=True):
            found[f"{name}/{state}"] = full[..., of_name].copy()
    return found


def stored_gradients(model: Any) -> dict[str, np.ndarray]:
    """Gradients of one device's model in their stored form, by key."""
    return {
        item.key: item.layout.to_stored(item.of_own(item.parameter.grad.numpy()))
        for item in model.stored_parameters()
        if item.parameter.grad is not None
    }


def worst_gradient(model: Any, wanted: dict[str, np.ndarray]) -> tuple[float, str]:
    """The largest error of a rank's summed gradients, relative to the largest entry of one
    device's, and its key. What one device has no gradient of, such as a tower without an image, may
    have zeros."""
    worst = (0.0, "")
    for item in model.stored_parameters():
        grad = item.parameter.grad
        if item.key not in wanted:
            assert grad is None or not grad.numpy().any(), item.key
            continue
        error = np.abs(item.of_own(grad.numpy()) - item.from_stored(wanted[item.key])).max()
        worst = max(worst, (float(error / max(np.abs(wanted[item.key]).max(), 1e-6)), item.key))
    return worst
