"""Which parameters of a model are matrices of linears, experts and vocabulary tables."""

from collections.abc import Iterator

from paddle import Tensor, nn

from paddle_vl.nn.experts import Experts
from paddle_vl.nn.linear import AdaptableLinear, Embedding, FusedLinear


def matrices(*roots: nn.Layer) -> Iterator[tuple[Tensor, int]]:
    """The matrices in some layers, each with the dim of its input features.

    The rows of a vocabulary table are the output channels of the head, which may share it. Routers
    and layers that are no linears (position tables, norms) are not among them.
    """
    for root in roots:
        for layer in root.sublayers(include_self=True):
            if isinstance(layer, Experts):
                yield layer.gate_up_proj, 1
                yield layer.down_proj, 1
            elif isinstance(layer, AdaptableLinear):
                yield layer.weight, layer.input_axis
            elif isinstance(layer, FusedLinear):
                yield layer.weight, 0
            elif isinstance(layer, Embedding):
                yield layer.weight, 1
