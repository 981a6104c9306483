"""Token cross entropy as (sum, count): the mean is made once, by whoever knows all the counts."""

import paddle
import paddle.nn.functional as F
from paddle import Tensor

IGNORE_INDEX = -100


def next_token_targets(labels_BL: Tensor) -> Tensor:
    """Labels moved one to the left, so that row i holds what row i predicts: `[T]` int64.

    The last position of every sample predicts nothing and is ignored.
    """
    ignored = paddle.full([labels_BL.shape[0], 1], IGNORE_INDEX, dtype=labels_BL.dtype)
    return paddle.concat([labels_BL[:, 1:], ignored], axis=1).reshape([-1])


def token_loss(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross entropy in float32 over the rows whose target is not ignored, and their number.

    Paddle's own mean divides by all rows, ignored ones too, when the ignored index is negative
    (paddlepaddle 3.3.1), so the sum is taken here and the division is left to the caller.

    Returns:
        Two float32 scalars, sum and count.
    """
    total = F.cross_entropy(
        logits_TV.astype("float32"), targets_T, ignore_index=IGNORE_INDEX, reduction="sum"
    )
    count = (targets_T != IGNORE_INDEX).astype("float32").sum()
    return total, count
