"""The seam between a model and its parallelism.

A model builds every layer that a parallel run would cut through a placement, and marks where token
rows enter the region that sequence parallelism cuts and where a product over all features begins.
It knows no rank beyond that.
"""

from collections.abc import Callable

import numpy as np
from paddle import Tensor, nn

from paddle_vl.batch.visual_index import RowPart
from paddle_vl.nn.linear import Embedding, Linear, VocabHead
from paddle_vl.nn.loss import token_loss
from paddle_vl.nn.norm import RMSNorm

# Pixels and grid of some items to merged rows `[M, D]` and levels, G times `[M, D]`.
Encoder = Callable[[Tensor, np.ndarray], tuple[Tensor, list[Tensor]]]


class SingleDevicePlacement:
    """Everything whole, on one device.

    Attributes:
        mp_group: the model-parallel group whose `rank` and `nranks` cut the token rows under
            sequence parallelism, as fleet has them; None on one device.
        splits_parameters: whether this rank holds less than all of the model.
        holds_embedding, holds_head: whether this rank has what comes before the decoder's layers
            (vision tower and token embedding), and what comes after them (norm and head).
        writes_files: whether this rank writes what several hold together.
    """

    mp_group = None
    splits_parameters = False
    writes_files = True
    holds_embedding = True
    holds_head = True

    @property
    def row_part(self) -> RowPart:
        """The part of the token rows that this rank's decoder layers hold."""
        if self.mp_group is None:
            return RowPart()
        return RowPart(self.mp_group.rank, self.mp_group.nranks)

    def column_linear(
        self, in_features: int, out_features: int, init_std: float = 0.02, num_heads: int = 0
    ) -> nn.Layer:
        """A linear whose output features may be split over ranks, heads kept whole."""
        return Linear(in_features, out_features, False, init_std)

    def row_linear(self, in_features: int, out_features: int, init_std: float = 0.02) -> nn.Layer:
        """A linear whose input features may arrive split; its output is whole again."""
        return Linear(in_features, out_features, False, init_std)

    def vocab_embedding(self, vocab_size: int, dim: int, init_std: float = 0.02) -> nn.Layer:
        """The token embedding, `[vocab, dim]`."""
        return Embedding(vocab_size, dim, init_std)

    def vocab_head(
        self, dim: int, vocab_size: int, init_std: float = 0.02, tied_weight: Tensor | None = None
    ) -> nn.Layer:
        """The output projection, `[vocab, dim]`, its own or the embedding's."""
        return VocabHead(dim, vocab_size, init_std, tied_weight)

    def rms_norm(self, size: int, epsilon: float) -> nn.Layer:
        """The norm of a token row."""
        return RMSNorm(size, epsilon)

    def head_norm(self, size: int, epsilon: float) -> nn.Layer:
        """The norm of a query or key head, one weight for all heads."""
        return RMSNorm(size, epsilon)

    def enter_rows(self, x_TD: Tensor) -> Tensor:
        """All T token rows to this rank's part of them."""
        return x_TD

    def enter_columns(self, x_TD: Tensor) -> Tensor:
        """This rank's token rows to all of them, in front of column linears or the head."""
        return x_TD

    def encode_visual(
        self, encode: Encoder, pixels: Tensor, grid_thw: np.ndarray, **sizes: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the tower over all items, in order.

        Args:
            sizes: `merge`, `width` and `num_levels` of what comes out.
        """
        return encode(pixels, grid_thw)

    def holds_layer(self, number: int) -> bool:
        """Whether this rank has that layer of the decoder."""
        return True

    def mark_tied(self, weight: Tensor) -> None:
        """Told once which weight the embedding and the head share, or this rank's copy of it."""

    def mark_tower(self, parameters: list[Tensor]) -> None:
        """Told once which parameters are the vision tower's."""

    def token_loss(self, logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        """Summed cross entropy and target count, see `paddle_vl.nn.loss.token_loss`."""
        return token_loss(logits_TV, targets_T)

    def whole_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Shape of a parameter before it was split over ranks."""
        return tuple(parameter.shape)

    def own_part(self, parameter: Tensor, whole: np.ndarray) -> np.ndarray:
        """What this rank holds of a whole value in the parameter's layout.

        A value of another shape, such as a scalar of the optimizer's, is nobody's part.
        """
        return whole

    def whole_value(self, parameter: Tensor, value: Tensor | None = None) -> np.ndarray:
        """The whole of a parameter, or of a `value` in its layout, such as a moment.

        Where ranks hold parts, all of them call this together.
        """
        return (parameter if value is None else value).numpy()
