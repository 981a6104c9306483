"""The split of layers into model chunks, and linears with delayed weight gradients."""

from itertools import combinations, pairwise

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paddle.distributed.fleet.meta_parallel.zero_bubble_utils import WeightGradStore

from paddle_vl.nn.linear import Linear
from paddle_vl.parallel.pipeline.runner import split_backward
from paddle_vl.parallel.pipeline.schedule import split_layers


@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    chunks=st.integers(1, 5),
    before=st.integers(0, 9),
    after=st.integers(0, 9),
)
def test_split_by_cost_is_the_best_there_is(costs, chunks, before, after):
    if chunks > len(costs):
        with pytest.raises(
            ValueError, match=f"{len(costs)} layers cannot fill {chunks} model chunks"
        ):
            split_layers(costs, chunks, before, after)
        return

    def most_expensive(bounds: list[int]) -> int:
        sums = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        sums[0] += before
        sums[-1] += after
        return max(sums)

    found = split_layers(costs, chunks, before, after)
    assert [layer for chunk in found for layer in chunk] == list(range(len(costs)))
    assert all(len(chunk) > 0 for chunk in found)
    least = min(
        most_expensive([0, *cuts, len(costs)])
        for cuts in combinations(range(1, len(costs)), chunks - 1)
    )
    assert most_expensive([chunk.start for chunk in found] + [len(costs)]) == least


def test_parts_that_are_not_the_most_expensive_are_even_and_the_first_the_shorter():
    assert [len(chunk) for chunk in split_layers([1] * 10, 4)] == [2, 2, 3, 3]
    assert [len(chunk) for chunk in split_layers([1.0] * 34, 4, before=16.0)] == [1, 11, 11, 11]


def step_of_linears(is_split: bool, waits: bool = False, frozen: bool = False) -> list:
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
    wanted, found = step_of_linears(False, frozen=frozen), step_of_linears(True, waits, frozen)
    assert found[3] == waits
    for one, other in zip([*found[:2], *found[2]], [*wanted[:2], *wanted[2]], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-6)
    assert (found[2][2] is None) == frozen
