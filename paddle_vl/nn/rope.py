"""Rotary position embedding: angles of the vision tower and of the decoder, and the rotation.

Shapes: T rows (of any leading dims), N heads, H head width, P patches. Angles are float32, since a
bfloat16 angle of position 300 is off by up to one radian. The rotation pairs channel i with channel
i + H/2 (the "rotate half" rule of HF transformers).

Source: Su et al., RoFormer, https://arxiv.org/abs/2104.09864.
"""

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.kernels import operation


def inverse_frequencies(num: int, theta: float) -> np.ndarray:
    """`theta^(-k / num)` for k in [0, num): float32 `[num]`."""
    return (1.0 / theta ** (np.arange(num, dtype=np.float32) / num)).astype(np.float32)


def interleaved_mrope_axis(num_slots: int, mrope_section: list[int]) -> np.ndarray:
    """The position axis (0 time, 1 height, 2 width) of each frequency slot: `[num_slots]` int64.

    Slot k reads height when k mod 3 is 1 and k < 3 * section[1], width when k mod 3 is 2 and
    k < 3 * section[2], time otherwise. Sections [4, 2, 2] over 8 slots give T H W T H W T T.
    Source: apply_interleaved_mrope of HF transformers' Qwen3-VL.
    """
    slot = np.arange(num_slots)
    axis = np.zeros(num_slots, dtype=np.int64)
    for dim in (1, 2):
        axis[(slot % 3 == dim) & (slot < 3 * mrope_section[dim])] = dim
    return axis


def mrope_cos_sin(
    position_ids_3BL: Tensor, head_dim: int, theta: float, mrope_section: list[int]
) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables of the decoder's multimodal rotary, each `[B, L, H]` float32.

    Args:
        position_ids_3BL: int64 positions on the time, height and width axes.
    """
    slots = head_dim // 2
    frequency_S = paddle.to_tensor(inverse_frequencies(slots, theta))
    axis = interleaved_mrope_axis(slots, mrope_section)
    # One-hot rows pick each slot's axis: no gather along a dim of three, and it exports.
    pick_3S = paddle.to_tensor(np.eye(3, dtype=np.float32)[axis].T.copy())
    position_BL3 = position_ids_3BL.transpose([1, 2, 0]).astype("float32")
    time, height, width = (
        position_BL3[:, :, dim : dim + 1] * (pick_3S[dim] * frequency_S) for dim in range(3)
    )
    return _cos_sin_of_halves(time + height + width)


def vision_cos_sin(
    coordinates_P2: Tensor, head_dim: int, theta: float = 10000.0
) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables of the vision tower, each `[P, H]` float32.

    The first quarter of the channels turns with the patch's row, the second with its column.

    Args:
        coordinates_P2: row and column of each patch.
    """
    frequency = paddle.to_tensor(inverse_frequencies(head_dim // 4, theta))
    angle_P2F = coordinates_P2.astype("float32").unsqueeze(-1) * frequency
    return _cos_sin_of_halves(angle_P2F.reshape([-1, head_dim // 2]))


def _cos_sin_of_halves(angle: Tensor) -> tuple[Tensor, Tensor]:
    angle = paddle.concat([angle, angle], axis=-1)
    return paddle.cos(angle), paddle.sin(angle)


def apply_rotary(x_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Rotate every head: `x * cos + rotate_half(x) * sin`.

    Computed in the dtype of the tables (float32) and cast to that of `x`. Leading dims may be any
    number, the same for `x` (before N) and the tables (before H). The tables get no gradient.
    """
    return _rotated(x_TNH, cos_TH.unsqueeze(-2), sin_TH.unsqueeze(-2))


@operation
def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.astype(cos.dtype)
    return (wide * cos + rotate_half(wide) * sin).astype(x.dtype)


@operation
def rotate_half(x: Tensor) -> Tensor:
    """`[-x2, x1]` for the halves `[x1, x2]` of the last dim."""
    half = x.shape[-1] // 2
    return paddle.concat([-x[..., half:], x[..., :half]], axis=-1)


@_rotated.register("cpu", "gpu")
class _Rotary(PyLayer):
    """Keeps the tables for the backward pass only, not the float32 copy of `x`."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated.plain(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensor()
        wide = grad.astype(cos.dtype)
        # The transpose of rotate_half is its negative.
        return (wide * cos - rotate_half(wide * sin)).astype(grad.dtype), None, None
