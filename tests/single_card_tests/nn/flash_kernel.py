"""A CPU stand-in for Paddle's flash attention on a GPU: its requirements and the exact result.

Paddle's CPU composition repeats and casts masks; the GPU kernel for bfloat16 and float16 does
neither. Dtypes are compared with each other, so float32 stands in for them here.
"""

import paddle


class FlashKernel:
    """Replaces `paddle.nn.functional.scaled_dot_product_attention` and counts its calls.

    Attributes:
        masks: mask shape of every call, None without a mask.
    """

    def __init__(self):
        self.masks: list[list[int] | None] = []

    def __call__(self, q_BLNH, k_BSKH, v_BSKH, attn_mask=None, is_causal=False):
        batch, length, heads, width = q_BLNH.shape
        keys, key_heads = k_BSKH.shape[1:3]
        assert k_BSKH.shape == v_BSKH.shape == [batch, keys, key_heads, width]
        assert heads % key_heads == 0
        assert width <= 256
        assert width % 8 == 0
        assert q_BLNH.dtype == k_BSKH.dtype == v_BSKH.dtype
        self.masks.append(None if attn_mask is None else list(attn_mask.shape))
        scores_BNLS = paddle.matmul(
            q_BLNH.transpose([0, 2, 1, 3]),
            k_BSKH.repeat_interleave(heads // key_heads, axis=2).transpose([0, 2, 3, 1]),
        )
        scores_BNLS = scores_BNLS * width**-0.5
        if attn_mask is not None:
            assert not is_causal, "the kernel takes a mask or the causal rule"
            assert attn_mask.dtype == q_BLNH.dtype
            assert list(attn_mask.shape) in (
                [batch, 1, length, keys],
                [batch, heads, length, keys],
            ), f"a mask of {attn_mask.shape} for {q_BLNH.shape} and {keys} keys"
            scores_BNLS = scores_BNLS + attn_mask
        if is_causal:
            assert length == keys, "the kernel's causal rule is for as many queries as keys"
            scores_BNLS = scores_BNLS + paddle.triu(paddle.full([length, keys], -1e30), 1)
        probability_BNLS = paddle.nn.functional.softmax(scores_BNLS)
        v_BNSH = v_BSKH.repeat_interleave(heads // key_heads, axis=2).transpose([0, 2, 1, 3])
        return paddle.matmul(probability_BNLS, v_BNSH).transpose([0, 2, 1, 3])
