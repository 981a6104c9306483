"""Token tables whose first row, the padding's, learns nothing."""

import paddle
from paddle import Tensor, nn
from paddle.autograd import PyLayer

PAD_ID = 0


class PaddedEmbedding(nn.Layer):
    """A table read by row and scaled; `PAD_ID`'s row is read but gets no gradient.

    Paddle's own `padding_idx` would read zeros.

    Args:
        table: an `Embedding`, or a rank's part of one.
        scale: of the rows. It is rounded to the table's dtype, as the original's is.
    """

    def __init__(self, table: nn.Layer, scale: float = 1.0):
        super().__init__()
        self.table, self.scale = table, scale

    @property
    def weight(self) -> Tensor:
        """`[num, D]`, or this rank's rows of it."""
        return self.table.weight

    def forward(self, ids_BL: Tensor) -> Tensor:
        """int64 `[B, L]` to `[B, L, D]`."""
        rows_BLD = self.table(ids_BL)
        if paddle.in_dynamic_mode():
            rows_BLD = _NoGradient.apply(rows_BLD, ids_BL != PAD_ID)
        if self.scale == 1.0:
            return rows_BLD
        return rows_BLD * paddle.to_tensor(self.scale).astype(rows_BLD.dtype)


class _NoGradient(PyLayer):
    """Identity; the gradient of rows that are not kept is zero."""

    @staticmethod
    def forward(ctx, rows_BLD, kept_BL):
        ctx.save_for_backward(kept_BL)
        return rows_BLD.clone()

    @staticmethod
    def backward(ctx, grad):
        (kept_BL,) = ctx.saved_tensor()
        return grad * kept_BL.astype(grad.dtype).unsqueeze(-1), None
