"""Wrappers around a layer's forward.

Guarantees: they run from the highest level inwards, in any order of application; the layer keeps
its parameters, their names, its attributes and its type; no method of an instance is overwritten; a
level can be used only once; a recomputed layer has the outputs and gradients of a plain one.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.nn.linear import Linear
from paddle_vl.parallel.layer_wrappers import Level, wrap_layer
from paddle_vl.parallel.recompute import recompute_layers


def noting(name: str, events: list[str]):
    def wrapper(forward, *inputs):
        events.append(name)
        return forward(*inputs)

    return wrapper


def layer() -> Linear:
    paddle.seed(0)
    return Linear(4, 3, bias=True)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_sharding_is_around_recomputation(is_reversed):
    one, events = layer(), []
    levels = [Level.RECOMPUTE, Level.SHARDING]
    for level in reversed(levels) if is_reversed else levels:
        wrap_layer(one, level, noting(level.name, events))
    x = paddle.ones([2, 4])
    np.testing.assert_array_equal(one(x).numpy(), layer()(x).numpy())
    assert events == ["SHARDING", "RECOMPUTE"]


def test_a_wrapped_layer_is_what_it_was():
    one = paddle.nn.Sequential(layer())
    names, parameters = list(one.state_dict()), one.parameters()
    wrap_layer(one[0], Level.SHARDING, noting("", []))
    assert isinstance(one[0], Linear)
    assert list(one.state_dict()) == names
    assert all(a is b for a, b in zip(one.parameters(), parameters, strict=True))
    assert "forward" not in vars(one[0])
    # Other layers of the class are unchanged.
    assert type(layer()) is Linear


def test_recomputation_changes_no_output_and_no_gradient():
    found = []
    for is_recomputed in (False, True):
        one, x, forwards = layer(), paddle.linspace(-1, 1, 8).reshape([2, 4]), []
        wrap_layer(one, Level.RECOMPUTE - 1, noting("forward", forwards))
        if is_recomputed:
            recompute_layers([one])
        y = one(x)
        (y * y).sum().backward()
        assert len(forwards) == 1 + is_recomputed
        found.append([y.numpy(), one.weight.grad.numpy(), one.bias.grad.numpy()])
    for plain, recomputed in zip(*found, strict=True):
        np.testing.assert_array_equal(recomputed, plain)
