"""Linears with delayed weight gradients.

Guarantees: a layer gives the same output and, once the delayed part has run, the same gradients;
until then its weights have none; a frozen weight never gets one; without such a schedule gradients
come at once.
"""

import numpy as np
import paddle
import pytest
from paddle.distributed.fleet.meta_parallel.zero_bubble_utils import WeightGradStore

from paddle_vl.nn.linear import Linear
from paddle_vl.parallel.pipeline.runner import split_backward


def run(is_split: bool, waits: bool = False, frozen: bool = False) -> list:
    """Output, input gradient, weight gradients, and whether the first weight was delayed."""
    paddle.seed(0)
    layers = paddle.nn.Sequential(Linear(4, 5, bias=True), Linear(5, 3, bias=False))
    layers[1].weight.stop_gradient = frozen
    if is_split:
        split_backward(layers)
    x = paddle.to_tensor(np.linspace(-1, 1, 24, dtype="float32").reshape(6, 4))
    x.stop_gradient = False
    out = layers(x)
    WeightGradStore.enabled = waits
    try:
        (out * out).sum().backward()
    finally:
        WeightGradStore.enabled = False
    had_to_wait = layers[0].weight.grad is None
    if waits:
        WeightGradStore.flush()
        WeightGradStore.pop()
    gradients = [p.grad for p in layers.parameters()]
    values = [None if g is None else g.numpy() for g in gradients]
    return [out.numpy(), x.grad.numpy(), values, had_to_wait]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_split_linears_have_the_same_gradients(waits, frozen):
    wanted, found = run(False, frozen=frozen), run(True, waits, frozen)
    assert found[3] == waits
    for one, other in zip([*found[:2], *found[2]], [*wanted[:2], *wanted[2]], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-6)
    assert (found[2][2] is None) == frozen
