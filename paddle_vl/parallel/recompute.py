"""Activation recomputation: what a layer's backward pass computes again instead of keeping it.

`full` keeps a layer's inputs and runs it again. `attention` and `mlp` do so with that part of it.
`act`, and the other two beside, keep no output of activations and norms: who needs one for its
backward pass, as a matrix product does, gets it made again of the operation's own inputs, which
are kept for its gradient anyway. The same operation on the same values gives the same bits.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import paddle
from paddle import Tensor, nn
from paddle.autograd import saved_tensors_hooks
from paddle.base.framework import EagerParamBase
from paddle.distributed.fleet.utils import recompute

from paddle_vl.nn import operations as ops
from paddle_vl.nn.delta_rule import gated_rms_norm
from paddle_vl.nn.dispatch import watched
from paddle_vl.parallel.layer_wrappers import Level, wrap_layer

# Names of the sublayers that are a layer's attention, or in its place, and its MLP or experts.
_PARTS = {"attention": ("self_attn", "linear_attn", "attn"), "mlp": ("mlp",)}
# Not the sum with the norm after it: its kernel keeps the sum, from which alone it cannot start.
_CHEAP = (
    *(ops.gelu, ops.swiglu, ops.geglu, ops.layer_norm),
    *(ops.rms_norm, ops.gemma_rms_norm, ops.rms_quotient, gated_rms_norm),
)


def recompute_layers(layers: Iterable[nn.Layer], what: str = "full") -> None:
    """Recompute activations of these layers in training; evaluation and generation do not.

    A layer, and each part that runs again, must take its tensors as positional arguments, the
    hidden rows first, so that Paddle tracks them.

    Args:
        what: `none`, `act`, `attention`, `mlp` or `full`.

    Raises:
        ValueError: a layer has no such part.
    """
    for layer in layers if what != "none" else ():
        parts = [layer]
        if what != "full":
            wrap_layer(layer, Level.RECOMPUTE, partial(_without_cheap_outputs, layer))
            names = _PARTS.get(what, ())
            parts = [one for name, one in layer.named_sublayers() if name.split(".")[-1] in names]
            if names and not parts:
                raise ValueError(
                    f"train.recompute is {what}, but {type(layer).__name__} has no sublayer called "
                    f"{' or '.join(names)}: name it so, or choose full or act"
                )
        for part in parts:
            wrap_layer(part, Level.RECOMPUTE, partial(_recomputed, part))


def _recomputed(layer: nn.Layer, forward: Callable[..., Any], hidden: Tensor, *inputs: Any) -> Any:
    is_trained = not all(p.stop_gradient for p in layer.parameters())
    needs_gradient = is_trained or not hidden.stop_gradient
    if not (layer.training and paddle.is_grad_enabled() and needs_gradient):
        return forward(hidden, *inputs)
    if hidden.stop_gradient:
        # Paddle's recompute is an autograd operation on the inputs: if none of them needs a
        # gradient, the layer's parameters would silently get none.
        hidden = hidden.detach()
        hidden.stop_gradient = False
    return recompute(forward, hidden, *inputs)


class _Output:
    """The output of an operation, which can be made again."""

    def __init__(self, operation: Callable[..., Tensor], inputs: tuple[Any, ...], value: Tensor):
        self.value = weakref.ref(value)
        self.users: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self._operation = operation
        self._inputs = [_without_graph(x) if isinstance(x, Tensor) else x for x in inputs]
        self._again: Tensor | None = None

    def again(self, user: "_Kept") -> Tensor:
        """The output for a user, which asks once; it is kept for the others."""
        again = self._again
        if again is None:
            with paddle.no_grad():
                again = self._operation(*self._inputs)
        self.users.discard(user)
        self._again = again if self.users else None
        return again


@dataclass(eq=False)
class _Kept:
    """What stands for a tensor that the backward pass needs: the tensor, or its `_Output`.

    Not a tuple, which Paddle would search for tensors.
    """

    source: Tensor | _Output
    stop_gradient: bool


def _without_graph(x: Tensor) -> Tensor:
    """What to keep of a tensor: an operation that keeps its own output would never be freed. A
    parameter stays itself, as sharding changes its storage."""
    return x if x.is_leaf else x.detach()


def _without_cheap_outputs(layer: nn.Layer, forward: Callable[..., Any], *inputs: Any) -> Any:
    if not (layer.training and paddle.is_grad_enabled()):
        return forward(*inputs)
    outputs: dict[int, _Output] = {}

    def note(operation: Any, arguments: tuple[Any, ...], value: Any) -> None:
        if operation in _CHEAP and value.size:
            outputs[value.data_ptr()] = _Output(operation, arguments, value)

    def pack(x: Any) -> Any:
        # A parameter of a hand-written operation, which may need its attributes; or None.
        if x is None or isinstance(x, EagerParamBase):
            return x
        output = outputs.get(x.data_ptr()) if x.size else None
        made = None if output is None else output.value()
        # Memory may have been given to another tensor, and a view may have another order.
        if output is not None and made is not None and x.shape == made.shape and x.is_contiguous():
            kept = _Kept(output, x.stop_gradient)
            output.users.add(kept)
            return kept
        return _Kept(_without_graph(x), x.stop_gradient)

    def unpack(kept: Any) -> Any:
        if not isinstance(kept, _Kept):
            return kept
        source = kept.source
        # Another tensor of the same memory, as Paddle takes the memory out of it.
        x = (source.again(kept) if isinstance(source, _Output) else source).detach()
        x.stop_gradient = kept.stop_gradient
        return x

    with watched(note), saved_tensors_hooks(pack, unpack):
        return forward(*inputs)
