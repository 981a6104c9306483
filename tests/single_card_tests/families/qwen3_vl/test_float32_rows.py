"""Float32 values in rows of another dtype.

Guarantees: they are read back bit for bit, also from bfloat16 rows, and take the announced number
of rows; their gradient passes unchanged in float32 and is rounded once in bfloat16.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.families.vlm.pipeline import (
    float32_from_rows,
    float32_to_rows,
    num_float32_rows,
)

DTYPES = [paddle.float32, paddle.bfloat16]


def values(shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of very different magnitude with all bits in use."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=shape) * 10.0 ** rng.integers(-6, 7, size=shape)
    return numbers.astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 6), (2, 128), (1,)])
def test_values_come_back_to_the_bit(dtype, shape):
    wanted = values(shape)
    rows = float32_to_rows(paddle.to_tensor(wanted), 16, dtype)
    assert rows.dtype == dtype
    assert rows.shape == [num_float32_rows(shape, 16, dtype), 16]
    np.testing.assert_array_equal(float32_from_rows(rows, shape).numpy(), wanted)


def test_whole_counts_survive_bfloat16():
    """Expert counts of a long batch; bfloat16 itself is exact up to 256."""
    counts = np.array([[257.0, 65537.0, 1048577.0]], np.float32)
    rows = float32_to_rows(paddle.to_tensor(counts), 8, paddle.bfloat16)
    np.testing.assert_array_equal(float32_from_rows(rows, (1, 3)).numpy(), counts)


def test_the_gradient_passes():
    x, weight = paddle.to_tensor(values((2, 6))), paddle.to_tensor(values((2, 6)))
    x.stop_gradient = False
    (float32_from_rows(float32_to_rows(x, 5, paddle.float32), (2, 6)) * weight).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), weight.numpy())
