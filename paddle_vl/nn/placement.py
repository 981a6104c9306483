"""The seam between a model and its parallelism.

A model builds every layer that a parallel run would cut through a placement, and marks where token
rows enter and leave the region that sequence parallelism splits. It knows no rank beyond that.
"""

from paddle import Tensor, nn

from paddle_vl.batch.visual_index import RowPart
from paddle_vl.nn.linear import Embedding, Linear, VocabHead
from paddle_vl.nn.loss import token_loss
from paddle_vl.nn.norm import LayerNorm, RMSNorm


class SingleDevicePlacement:
    """Everything whole, on one device.

    Attributes:
        mp_group: the model-parallel group whose `rank` and `nranks` cut the token rows under
            sequence parallelism, as a `paddle.distributed` group has them; None on one device.
    """

    mp_group = None

    @property
    def row_part(self) -> RowPart:
        """The part of the token rows that this rank's decoder layers hold."""
        if self.mp_group is None:
            return RowPart()
        return RowPart(self.mp_group.rank, self.mp_group.nranks)

    def column_linear(
        self, in_features: int, out_features: int, bias: bool = False, init_std: float = 0.02
    ) -> nn.Layer:
        """A linear whose output features a parallel placement splits over ranks."""
        return Linear(in_features, out_features, bias, init_std)

    def row_linear(
        self, in_features: int, out_features: int, bias: bool = False, init_std: float = 0.02
    ) -> nn.Layer:
        """A linear whose input features arrive split, and whose output is summed over ranks."""
        return Linear(in_features, out_features, bias, init_std)

    def vocab_embedding(self, vocab_size: int, dim: int, init_std: float = 0.02) -> nn.Layer:
        """The token embedding, `[vocab, dim]`."""
        return Embedding(vocab_size, dim, init_std)

    def vocab_head(
        self, dim: int, vocab_size: int, init_std: float = 0.02, tied_weight: Tensor | None = None
    ) -> nn.Layer:
        """The output projection, `[vocab, dim]`, its own or the embedding's."""
        return VocabHead(dim, vocab_size, init_std, tied_weight)

    def rms_norm(self, size: int, epsilon: float) -> nn.Layer:
        return RMSNorm(size, epsilon)

    def layer_norm(self, size: int, epsilon: float) -> nn.Layer:
        return LayerNorm(size, epsilon)

    def enter_rows(self, x_TD: Tensor) -> Tensor:
        """All T token rows to this rank's part of them."""
        return x_TD

    def leave_rows(self, x_TD: Tensor) -> Tensor:
        """This rank's part of the token rows to all of them."""
        return x_TD

    def token_loss(self, logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        """Summed cross entropy and target count, see `paddle_vl.nn.loss.token_loss`."""
        return token_loss(logits_TV, targets_T)
