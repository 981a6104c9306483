"""Paddle's AdamW with float32 master weights, and updates that can be skipped on the device."""

from collections.abc import Mapping
from typing import Any

import paddle
from paddle import Tensor

# Paddle's names of a parameter's optimizer state: the moments, and the powers of beta so far.
STATES = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")


def gradient_of(tensor: Tensor) -> Tensor | None:
    """The gradient for the optimizer: fleet's float32 `main_grad` if set, else `grad`."""
    main = getattr(tensor, "main_grad", None)
    return tensor.grad if main is None else main


class AdamW(paddle.optimizer.AdamW):
    """AdamW whose step updates float32 master weights in place of half-precision parameters.

    Paddle's own `multi_precision` is not used: its bfloat16 kernel exists on GPUs only. The class
    must be called AdamW, since Paddle fuses optimizer state by class name.

    Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
    """

    def __init__(self, **settings):
        super().__init__(**settings)
        self._masks = False
        self._is_good, self._factor = paddle.ones([], dtype="bool"), paddle.ones([])

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
        self._masks, self._is_good, self._factor = True, is_good, factor
        self.set_lr(learning_rate)
        self._create_global_learning_rate()
        rate: Any = self._global_learning_rate()
        paddle.assign(rate * is_good.astype(rate.dtype), rate)

    def unmask(self, learning_rate: float) -> None:
        """Make the next step update unconditionally, with unscaled gradients."""
        self._masks = False
        self.set_lr(learning_rate)

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
        parameter unchanged; moments and powers of beta are restored from copies, which exist for
        one parameter at a time.
        """
        grad = paddle.where(self._is_good, grad * self._factor, paddle.zeros([]))
        states = [self._get_accumulator_master(state, updated) for state in STATES]
        before = [state.clone() for state in states]
        super()._append_optimize_op(block, (updated, grad))
        for state, old in zip(states, before, strict=True):
            paddle.assign(paddle.where(self._is_good, state, old), state)
