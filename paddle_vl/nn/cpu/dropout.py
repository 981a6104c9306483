"""Dropout on the CPU: Paddle's generator seeds a faster one, which draws the whole tensor.

Paddle's own kernel draws in one thread, with a generator that takes as long as a small product.
"""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.cpu import onednn
from paddle_vl.nn.operations import dropout

# SFC64 mixes its seed with its counter in the first draws.
MIXING_DRAWS = 12


def seed() -> list[int]:
    """Three numbers from the state of Paddle's generator, which advances."""
    high, low = paddle.randint(0, 2**31 - 1, [2, 3], dtype="int64").numpy()
    return (high << 31 | low).tolist()


def threshold(p: float) -> tuple[int, int]:
    """`p` in units of 2^-32: the first byte, and the other three."""
    return divmod(round(p * 2**32), 1 << 24)


def kept(shape: list[int], p: float, words: list[int]) -> np.ndarray:
    """bool: each entry is kept with probability `1 - p`.

    One byte per entry decides, unless it equals the first one of `p`; then three more do.

    Args:
        words: of `seed`; the same ones give the same entries.

    Source: SFC64 of PractRand (Chris Doty-Humphrey), as in NumPy.
    """
    generator = np.random.SFC64()
    generator.state = {
        "bit_generator": "SFC64",
        "state": {"state": np.array([*words, 1], dtype=np.uint64)},
        "has_uint32": 0,
        "uinteger": 0,
    }
    generator.random_raw(MIXING_DRAWS)
    size, (first, rest) = int(np.prod(shape)), threshold(p)
    drawn = generator.random_raw(-(-size // 8)).view(np.uint8)[:size]
    is_kept, ties = drawn > first, np.flatnonzero(drawn == first)
    is_kept[ties] = generator.random_raw(ties.size) & np.uint64(0xFFFFFF) >= rest
    return is_kept.reshape(shape)


class _Dropout(PyLayer):
    """Keeps one byte per entry."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.factor = np.float32(1.0 / (1.0 - p))
        ctx.kept = kept(x.shape, p, seed())
        return _scaled(x, ctx.kept, ctx.factor)

    @staticmethod
    def backward(ctx, grad):
        return _scaled(grad, ctx.kept, ctx.factor)


def _scaled(x: Tensor, is_kept: np.ndarray, factor: np.float32) -> Tensor:
    if onednn.takes(x):
        y = paddle.empty_like(x)
        run = onednn.times_bytes(is_kept.size, float(factor))
        run(x.data_ptr(), is_kept.ctypes.data, y.data_ptr())
        return y
    factors = paddle.to_tensor(is_kept * factor, place=x.place)
    return x * factors.astype(x.dtype)


@dropout.register("cpu")
def dropout_by_numpy(x: Tensor, p: float) -> Tensor:
    """The operation; the compiled kernel draws the same numbers."""
    if not 0.0 < p < 1.0 or 0 in x.shape:
        return F.dropout(x, p)
    return _Dropout.apply(x, p)
