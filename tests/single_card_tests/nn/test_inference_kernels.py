"""Kernels without a backward pass.

Guarantees: each equals its plain implementation within float32 rounding, on odd sizes, also inside
a traced program, and half precision takes the plain one; a single query over whole buffers sees the
keys so far and no hidden or free position.
"""

import numpy as np
import paddle
import pytest
from paddle.static import InputSpec

from paddle_vl.nn.attention import MASKED_SCORE
from paddle_vl.nn.cached_attention import CachedKeys, cached_attention
from paddle_vl.nn.cpu import inference as _kernels  # noqa: F401  Registers them.
from paddle_vl.nn.linear import biased_linear
from paddle_vl.nn.norm import layer_norm, rms_norm
from paddle_vl.nn.operations import swiglu, use_kernels, without_gradient
from paddle_vl.nn.rotary import RotaryTables, apply_rotary


def normal(*shape: int, seed: int = 0) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def rms_normed(x, weight_C):
    return rms_norm(x, weight_C, 1e-6)


def layer_normed(x, weight_C, bias_C):
    return layer_norm(x, weight_C, bias_C, 1e-6)


def rotated(q_TNH, k_TKH, angle_TF):
    tables = RotaryTables.of_angles(angle_TF)
    return paddle.concat(apply_rotary(q_TNH, k_TKH, tables), axis=1)


def product(x, weight, bias):
    return biased_linear(x, weight, bias)


def gated(gate, up):
    return swiglu(gate, up)


def halves_gated(halves):
    return swiglu(halves)


CALLS = {
    "rms_norm": (rms_normed, [normal(3, 7, 33), normal(33, seed=1)]),
    "rms_norm of tiny rows": (rms_normed, [normal(5, 8) * 1e-4, normal(8, seed=1)]),
    "rms_norm of one row": (rms_normed, [normal(1, 129) * 100, normal(129, seed=1)]),
    "layer_norm": (layer_normed, [normal(7, 33), normal(33, seed=1), normal(33, seed=2)]),
    "layer_norm far from zero": (
        layer_normed, [normal(5, 24) + 100.0, normal(24, seed=1), normal(24, seed=2)]
    ),
    "biased_linear": (product, [normal(5, 7), normal(7, 3, seed=1), normal(3, seed=2)]),
    "swiglu": (gated, [normal(5, 7) * 30, normal(5, 7, seed=1)]),
    "swiglu of halves": (halves_gated, [normal(5, 14)]),
    "apply_rotary": (
        rotated, [normal(5, 6, 8), normal(5, 2, 8, seed=1), normal(5, 4, seed=2) * 100]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_equals_the_plain_implementation(name):
    call, inputs = CALLS[name]
    with use_kernels("plain"):
        wanted = call(*inputs).numpy()
    with without_gradient():
        found = call(*inputs).numpy()
        specs = [InputSpec([None, *x.shape[1:]], "float32") for x in inputs]
        specs = [InputSpec(x.shape, "float32") if x.ndim == 1 else one
                 for x, one in zip(inputs, specs, strict=True)]  # fmt: skip
        traced = paddle.jit.to_static(call, full_graph=True, input_spec=specs)(*inputs).numpy()
    # Relative to the largest: rows far from zero lose digits in their mean.
    limit = (2e-5 if "far" in name else 1e-6) * np.abs(wanted).max()
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= limit
    assert np.abs(traced - wanted).max() <= limit


def test_norms_of_half_precision_take_the_plain_implementation():
    x, weight_C = normal(3, 16).astype("bfloat16"), normal(16, seed=1).astype("bfloat16")
    with use_kernels("plain"):
        wanted = [rms_norm(x, weight_C, 1e-6), layer_norm(x, weight_C, weight_C, 1e-6)]
    with without_gradient():
        found = [rms_norm(x, weight_C, 1e-6), layer_norm(x, weight_C, weight_C, 1e-6)]
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == paddle.bfloat16
        np.testing.assert_array_equal(one.astype("float32"), other.astype("float32"))


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("is_padded", [False, True])
def test_whole_buffers_give_the_attention_of_the_keys_so_far(length, is_padded):
    batch, heads, key_heads, width, capacity, keys = 2, 6, 2, 8, 11, 7
    query = normal(batch, length, heads, width)
    buffers = [normal(batch, key_heads, capacity, width, seed=seed) for seed in (1, 2)]
    bias_BS = None
    if is_padded:
        bias_BS = paddle.zeros([batch, keys])
        bias_BS[1, :3] = MASKED_SCORE
    with use_kernels("plain"):
        wanted = cached_attention(query, *buffers, CachedKeys(keys, bias_BS)).numpy()
    with without_gradient():
        found = cached_attention(query, *buffers, CachedKeys(keys, bias_BS)).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    hidden = buffers[1].clone()
    hidden[:, :, keys:] = 1e4
    if is_padded:
        hidden[1, :, :3] = -1e4
    with without_gradient():
        again = cached_attention(query, buffers[0], hidden, CachedKeys(keys, bias_BS)).numpy()
    np.testing.assert_array_equal(again, found)
