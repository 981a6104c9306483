"""Paddle's AdamW with float32 master weights, and updates that can be skipped on the device."""

from collections.abc import Mapping
from typing import Any

import paddle
from paddle import Tensor
from paddle.base.framework import default_main_program

# Paddle's names of a parameter's optimizer state: the moments, and the powers of beta so far.
STATES = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
POWERS = STATES[2:]


def gradient_of(tensor: Tensor) -> Tensor | None:
    """The gradient for the optimizer: fleet's float32 `main_grad` if set, else `grad`."""
    main = getattr(tensor, "main_grad", None)
    return tensor.grad if main is None else main


def fill_gradient(tensor: Tensor) -> None:
    """Give a tensor without a gradient one of zeros; also each tensor of a flat bucket."""
    bucket = getattr(tensor, "bucket", None)
    if bucket is not None:
        bucket.fill()
    elif gradient_of(tensor) is None:
        tensor.grad = paddle.zeros_like(tensor)


class AdamW(paddle.optimizer.AdamW):
    """AdamW whose step updates float32 master weights in place of half-precision parameters.

    Paddle's own `multi_precision` is not used: its bfloat16 kernel exists on GPUs only. The class
    must be called AdamW, since Paddle fuses optimizer state by class name.

    Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
    """

    def __init__(self, **settings):
        super().__init__(**settings)
        self._masks = False
        self._is_good, self._factor = paddle.ones([1], dtype="bool"), paddle.ones([])

    def use_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Update these float32 copies (by parameter name) and round them into the parameters."""
        self._master_weights.update(masters)

    def mask(self, learning_rate: float, factor: Tensor, is_good: Tensor) -> None:
        """Make the next step scale gradients by `factor`, or change nothing, bit for bit.

        The host does not read the flag.

        Args:
            factor: float32 scalar, on the device.
            is_good: bool scalar, on the device; False leaves weights and state unchanged.
        """
        self._masks, self._is_good, self._factor = True, is_good.reshape([1]), factor
        self.set_lr(learning_rate)
        self._create_global_learning_rate()
        rate: Any = self._global_learning_rate()
        paddle.assign(rate * self._is_good.astype(rate.dtype).reshape(rate.shape), rate)

    def unmask(self, learning_rate: float) -> None:
        """Make the next step update unconditionally, with unscaled gradients."""
        self._masks = False
        self.set_lr(learning_rate)

    @paddle.no_grad()
    def update(self, values: Tensor, grad: Tensor) -> None:
        """Update a tensor that is none of the optimizer's parameters, as part of a flat bucket.

        Args:
            values: float32, with `name` and `optimize_attr` as of a parameter, and `states`, its
                state tensors by name.
        """
        self._create_global_learning_rate()
        self._append_optimize_op(default_main_program().global_block(), (values, grad))

    def _get_accumulator_master(self, name, param):
        states = getattr(param, "states", None)
        return super()._get_accumulator_master(name, param) if states is None else states[name]

    def _create_accumulators(self, block, parameters):
        masters = self._master_weights
        super()._create_accumulators(block, [masters.get(p.name, p) for p in parameters])

    def _append_optimize_op(self, block, param_and_grad):
        parameter, grad = param_and_grad
        updated = self._master_weights.get(parameter.name, parameter)
        if self._masks:
            self._update_masked(block, updated, grad)
        else:
            super()._append_optimize_op(block, (updated, grad))
        if updated is not parameter:
            paddle.assign(updated.astype(parameter.dtype), parameter)

    def _update_masked(self, block, updated: Tensor, grad: Tensor) -> None:
        """Update, then undo the update where `is_good` is False.

        Paddle's AdamW kernel takes no flag on the device. A learning rate of zero leaves the
        parameter unchanged if the gradient is finite; moments and powers of beta are restored from
        copies, which exist for one tensor at a time. The gradient is overwritten.
        """
        states = [self._get_accumulator_master(state, updated) for state in STATES]
        before = [state.clone() for state in states]
        is_good = self._is_good.expand(grad.shape)
        grad = grad.multiply_(self._factor)
        # Some finite values, as any will do.
        paddle.where_(is_good, grad, before[0].reshape(grad.shape))
        super()._append_optimize_op(block, (updated, grad))
        for state, old in zip(states, before, strict=True):
            flag = is_good if state.shape == grad.shape else self._is_good
            paddle.where_(flag, state, old)
