"""Models whose parameters are materialized one by one: the values are those of construction."""

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_vl import PI07Config, Qwen3VLForConditionalGeneration
from paddle_vl.checkpoint.reading import Materializable, MaterializeStep
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.nn.linear import default_dtype
from tests.support.pi07_golden import case, config_values
from tests.support.tiny import tiny_config


class Pair(Materializable, nn.Layer):
    """Two parameters without values."""

    def __init__(self):
        super().__init__()
        with paddle.LazyGuard():
            self.first, self.second = self.create_parameter([2]), self.create_parameter([3])


def steps(model: Pair, made: list[str]) -> list[MaterializeStep]:
    def give(name: str, value: float) -> None:
        made.append(name)
        paddle.full(getattr(model, name).shape, value)._share_buffer_to(getattr(model, name))

    return [
        MaterializeStep(model.first, lambda: give("first", 1.0)),
        MaterializeStep(None, lambda: made.append("elsewhere")),
        MaterializeStep(model.second, lambda: give("second", 2.0)),
    ]


def qwen(is_lazy: bool) -> nn.Layer:
    if is_lazy:
        return Qwen3VLForConditionalGeneration.from_config(tiny_config())
    return Qwen3VLForConditionalGeneration(tiny_config(), None)


def pi07(is_lazy: bool) -> nn.Layer:
    description, _ = case("01_all_fields")
    config = PI07Config.from_dict(config_values(description))
    labels = description["config"]["indicator_token_ids"]
    if not is_lazy:
        return PI07LowLevelFlowMatching(config, labels)
    with paddle.LazyGuard():
        model = PI07LowLevelFlowMatching(config, labels)
    model.materialize_later(model.fresh_values)
    model.materialize_all()
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [qwen, pi07])
def test_fresh_weights_are_those_drawn_as_they_are_made(make, dtype):
    found, wanted = (
        _weights_and_next_number(lambda is_lazy=is_lazy: make(is_lazy), dtype)
        for is_lazy in (True, False)
    )
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def _weights_and_next_number(make, dtype: str) -> dict[str, np.ndarray]:
    paddle.seed(3)
    with default_dtype(dtype):
        model = make()
    values = {name: parameter.numpy() for name, parameter in model.named_parameters()}
    return values | {"next": paddle.randint(0, 1 << 30, [1]).numpy()}


def test_one_parameter_at_a_time_gets_its_value():
    model, made = Pair(), []
    model.materialize_later(lambda: steps(model, made))
    filling = model.materialize()
    assert next(filling) is model.first
    assert made == ["first"]
    assert not model.second._is_initialized()
    model.first._clear_data()
    assert [p is model.second for p in filling] == [True]
    assert made == ["first", "elsewhere", "second"]
    assert not model.first._is_initialized()


def test_parameters_of_a_filled_model_come_once_each_and_later_ones_are_filled_at_once():
    model, made = Pair(), []
    model.materialize_later(lambda: steps(model, []))
    model.materialize_all()
    assert [id(p) for p in model.materialize()] == [id(model.first), id(model.second)]
    model.materialize_too(lambda: steps(model, made))
    assert made == ["first", "elsewhere", "second"]
    assert model.second.tolist() == [2.0, 2.0, 2.0]


def test_the_last_value_of_a_parameter_is_the_one_made():
    model, made = Pair(), []
    model.materialize_later(lambda: steps(model, made))
    other = paddle.to_tensor([5.0, 6.0])
    later = MaterializeStep(model.first, lambda: other._share_buffer_to(model.first))
    model.materialize_too(lambda: [later])
    assert [id(p) for p in model.materialize()] == [id(model.second), id(model.first)]
    assert made == ["elsewhere", "second"]
    assert model.first.tolist() == [5.0, 6.0]
