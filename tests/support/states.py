"""The state of an optimizer as arrays."""

import numpy as np
import paddle

from paddle_vl.nn.linear import whole_slices
from paddle_vl.train.optimizer import Optimizer


def states_of(optimizer: Optimizer) -> dict[str, np.ndarray]:
    """Copies of all state, unsharded, by the names of `state_to_write`; collective where it is
    sharded."""
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
        full = table.full_value(parameter, store.gathered_value(parameter, own))
        columns = whole_slices(parameter) if len(names) > 1 else [slice(None)]
        for name, of_name in zip(names, columns, strict=True):
            found[f"{name}/{state}"] = full[..., of_name].copy()
    return found
