"""Kernels of a GPU that the models of both families call.

Guarantees: a forward and backward pass of each model calls each of Paddle's fused kernels as often
as its layers need it, and one that a layer leaves out is noticed. The kernels are the stand-ins of
`tests/support/gpu_stubs`.
"""

from collections import Counter
from functools import partial

import pytest

from paddle_vl.nn import operations
from paddle_vl.testing import tiny_pi07, tiny_pi07_batch, tiny_qwen3_vl, tiny_qwen3_vl_batch
from paddle_vl.testing.qwen3_vl import EXPERTS
from tests.support.gpu_stubs.installed import CALLS
from tests.support.gpu_stubs.pretended import pretended_gpu

BUILDS = {
    "qwen3_vl": tiny_qwen3_vl,
    "experts": partial(tiny_qwen3_vl, **EXPERTS),
    "pi07": tiny_pi07,
}
QWEN3_VL = {
    "layer_norm": 7, "rms_norm": 10, "fused_rms_norm": 3, "rms_norm_grad": 3,
    "fused_rotary_position_embedding": 10, "flash_attn_unpadded": 2, "flashmask_attention": 3,
}  # fmt: skip
COUNTS = {
    "qwen3_vl": QWEN3_VL,
    "experts": QWEN3_VL,
    "pi07": {
        "layer_norm": 7, "fused_rms_norm_ext": 27, "fused_rotary_position_embedding": 12,
        "flash_attn": 7, "flashmask_attention": 3,
    },
}  # fmt: skip


def calls_of(name: str) -> Counter:
    """Calls of each kernel in a forward and backward pass."""
    model = BUILDS[name]()
    begin = len(CALLS)
    with pretended_gpu() as attention:
        if name == "pi07":
            losses = model(tiny_pi07_batch())
            loss = losses["MSE"] + losses["CE"]
        else:
            loss = model(**tiny_qwen3_vl_batch()).loss
        loss.backward()
    return Counter([*CALLS[begin:], *(call.name for call in attention)])


@pytest.mark.parametrize("name", BUILDS)
def test_fused_kernels_of_a_model(name):
    assert dict(calls_of(name)) == COUNTS[name]


def test_a_kernel_that_a_layer_leaves_out_is_noticed(monkeypatch):
    monkeypatch.setattr(operations, "rms_norm", operations.rms_norm.plain)
    assert calls_of("qwen3_vl")["rms_norm"] < COUNTS["qwen3_vl"]["rms_norm"]
