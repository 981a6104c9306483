"""Rotary position embedding: tables of cosines and sines, and the rotation of queries and keys.

Shapes: T token rows, or any leading dims such as B, L; N query heads, K key heads, H head width, P
patches. Angles are float32: in bfloat16, position 300 is off by up to one radian. Channel i is
rotated with channel i + H/2 ("rotate half" of HF transformers).

Source: Su et al., RoFormer, https://arxiv.org/abs/2104.09864.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.nn.operations import host_table, operation


class RotaryTables:
    """Cosines and sines of every token row; one object for all layers of a forward pass.

    Not a tuple, which Paddle's recompute searches for tensors; it unpacks like one. The tables get
    no gradient.

    Args:
        cos_TH, sin_TH: float32; the second half of the channels repeats the first.
    """

    def __init__(self, cos_TH: Tensor, sin_TH: Tensor):
        self.cos_TH, self.sin_TH = cos_TH, sin_TH
        self._by_heads: dict[int, tuple[Tensor, Tensor]] = {}
        self._by_dtype: dict[str, RotaryTables] = {}

    @classmethod
    def of_angles(cls, angle_TF: Tensor) -> "RotaryTables":
        """Tables of the angles of the first half of the channels, `F = H / 2`."""
        angle_TH = paddle.concat([angle_TF, angle_TF], axis=-1)
        return cls(paddle.cos(angle_TH), paddle.sin(angle_TH))

    def __iter__(self) -> Iterator[Tensor]:
        yield self.cos_TH
        yield self.sin_TH

    def astype(self, dtype: Any) -> "RotaryTables":
        """These tables rounded to another dtype, in which the rotation is then computed."""
        if self.cos_TH.dtype == dtype:
            return self
        name = str(dtype)
        if name not in self._by_dtype:
            self._by_dtype[name] = RotaryTables(
                self.cos_TH.astype(dtype), self.sin_TH.astype(dtype)
            )
        return self._by_dtype[name]

    def of_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine `[T, heads, H]`, kept: Paddle's CPU kernels take ten times as long to
        broadcast over a middle dim."""
        if heads not in self._by_heads:
            self._by_heads[heads] = (
                paddle.concat([self.cos_TH.unsqueeze(-2)] * heads, axis=-2),
                paddle.concat([self.sin_TH.unsqueeze(-2)] * heads, axis=-2),
            )
        return self._by_heads[heads]

    def prepare(self, num_heads: Sequence[int]) -> None:
        """Make the tables of these numbers of heads now, for plain operations too, and outside of a
        loop of a program that reads them."""
        for heads in num_heads:
            self.of_heads(heads)

    def for_product(self, heads: int) -> tuple[Tensor, Tensor]:
        """Tables that broadcast to `[T, heads, H]`: those of `prepare`, else `[T, 1, H]`."""
        if heads in self._by_heads:
            return self._by_heads[heads]
        return self.cos_TH.unsqueeze(-2), self.sin_TH.unsqueeze(-2)


def inverse_frequencies(num: int, theta: float) -> np.ndarray:
    """`theta^(-k / num)` for k in [0, num): float32 `[num]`."""
    return (1.0 / theta ** (np.arange(num, dtype=np.float32) / num)).astype(np.float32)


_frequency_table = host_table(inverse_frequencies)


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


@host_table
def _picked_frequencies(slots: int, theta: float, mrope_section: tuple[int, ...]) -> np.ndarray:
    """`[3, slots]` float32: each slot's frequency on its axis, 0 on the others, which select the
    axis without a gather, and export."""
    axis = interleaved_mrope_axis(slots, list(mrope_section))
    return np.eye(3, dtype=np.float32)[axis].T * inverse_frequencies(slots, theta)


def mrope_tables(
    position_ids_3BL: Tensor, head_dim: int, theta: float, mrope_section: list[int]
) -> RotaryTables:
    """Tables `[B, L, H]` of the decoder's multimodal rotary.

    Args:
        position_ids_3BL: int64 positions on the time, height and width axes.
    """
    picked_3S = _picked_frequencies(head_dim // 2, theta, tuple(mrope_section))
    position_BL3 = position_ids_3BL.transpose([1, 2, 0]).astype("float32")
    time, height, width = (position_BL3[:, :, dim : dim + 1] * picked_3S[dim] for dim in range(3))
    return RotaryTables.of_angles(time + height + width)


def vision_tables(coordinates_P2: Tensor, head_dim: int, theta: float = 10000.0) -> RotaryTables:
    """Tables `[P, H]` of the vision tower.

    The first quarter of the channels is rotated by the patch's row, the second by its column.

    Args:
        coordinates_P2: row and column of each patch.
    """
    frequency_F = _frequency_table(head_dim // 4, theta)
    angle_P2F = coordinates_P2.astype("float32").unsqueeze(-1) * frequency_F
    return RotaryTables.of_angles(angle_P2F.reshape([-1, head_dim // 2]))


@operation
def apply_rotary(q_TNH: Tensor, k_TKH: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
    """Rotate every head of queries and keys: `x * cos + rotate_half(x) * sin`.

    Computed in the dtype of the tables and cast to that of the inputs. Leading dims may be any
    number, the same for queries, keys (before the heads) and tables (before H).

    Returns:
        The rotated queries and keys. One of them without a gradient gives its input none.
    """
    return _rotated(q_TNH, tables), _rotated(k_TKH, tables)


def _rotated(x_TNH: Tensor, tables: RotaryTables) -> Tensor:
    return _rotation(x_TNH, *tables.for_product(x_TNH.shape[-2]))


def _rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.astype(cos.dtype)
    return (wide * cos + rotate_half(wide) * sin).astype(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    """`[-x2, x1]` for the halves `[x1, x2]` of the last dim."""
    half = x.shape[-1] // 2
    return paddle.concat([-x[..., half:], x[..., :half]], axis=-1)
