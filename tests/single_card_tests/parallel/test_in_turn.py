"""Two branches with collectives have their backward passes one after the other, on every rank."""

import paddle
import pytest
from paddle.autograd import PyLayer

from paddle_vl.parallel.collectives import in_turn

ORDER: list[str] = []


class Collective(PyLayer):
    """Stands for one: notes when its backward pass runs."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ORDER.append(ctx.name)
        return grad


def longer(x, by: int):
    for _ in range(by):
        x = x * 1.5
    return x


@pytest.mark.parametrize(("of_first", "of_second"), [(0, 5), (5, 0)])
@pytest.mark.parametrize("trains_input", [True, False])
def test_the_order_does_not_depend_on_the_lengths_of_branches(of_first, of_second, trains_input):
    """As of routed experts and a shared one, of which a rank with padding has longer branches."""
    ORDER.clear()
    x = paddle.to_tensor([1.0, 2.0], stop_gradient=not trains_input)
    weight = paddle.to_tensor([3.0, 4.0], stop_gradient=False)
    entered = x * 2.0
    first = longer(Collective.apply(entered * weight, "first"), of_first)
    entered, first = in_turn(entered, first)
    second = longer(Collective.apply(entered * weight, "second"), of_second)
    (first + second).sum().backward()
    assert ORDER == ["second", "first"]
    factor = 1.5**of_first + 1.5**of_second
    assert weight.grad.tolist() == pytest.approx([2.0 * factor, 4.0 * factor])
    if trains_input:
        assert x.grad.tolist() == pytest.approx([6.0 * factor, 8.0 * factor])


def test_a_branch_without_a_gradient_is_left_alone():
    x, y = paddle.to_tensor(1.0, stop_gradient=False), paddle.to_tensor(1.0)
    same_x, same_y = in_turn(x, y)
    assert same_x is x
    assert same_y is y
