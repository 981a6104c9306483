"""Kernels and kept bytes of one layer of each kind on a GPU.

Guarantees: the launches of a layer, forward and backward, and the bytes that it keeps per token
row, plain and fused, of both families, are those of these tables; a kernel more fails; after the
first pass no layer reads the device or copies from the host. The counts are of programs that run,
with stand-ins of the kernels that need a GPU (`tests/support/gpu_stubs/counting.py`).
"""

import paddle
import pytest

from paddle_vl.families.pi07.engine_config import (
    Gemma3TextConfig,
    GemmaExpertConfig,
    SiglipVisionConfig,
)
from paddle_vl.nn import norm
from paddle_vl.nn.operations import use_kernels
from paddle_vl.testing import forbid_host_reads, record_device_copies
from paddle_vl.testing.qwen3_vl import EXPERTS
from tests.support.gpu_stubs import layers
from tests.support.gpu_stubs.contract import halves_are
from tests.support.gpu_stubs.counting import counted
from tests.support.tiny import tiny_config

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TEXT = Gemma3TextConfig(hidden_size=16, intermediate_size=24, query_pre_attn_scalar=8, **HEADS)
EXPERT = GemmaExpertConfig(hidden_size=12, adarms_cond_dim=12, intermediate_size=20, **HEADS)
TOWER = SiglipVisionConfig(
    hidden_size=16, intermediate_size=24, num_attention_heads=2, image_size=28, patch_size=14
)
CASES = {
    "qwen3_vl decoder": lambda: layers.qwen3_vl_decoder(tiny_config(), 4),
    "qwen3_vl decoder with experts": lambda: layers.qwen3_vl_decoder(tiny_config(**EXPERTS), 4),
    "qwen3_vl tower": lambda: layers.qwen3_vl_tower(tiny_config(), 4),
    "pi07 backbone": lambda: layers.pi07_backbone(TEXT, 4),
    "pi07 expert": lambda: layers.pi07_expert(TEXT, EXPERT, 4, 4),
    "pi07 tower": lambda: layers.pi07_tower(TOWER),
}
# Launches forward and backward, and kept bytes per token row.
COUNTS = {
    ("qwen3_vl decoder", "plain"): (55, 59, 1120.0),
    ("qwen3_vl decoder", "gpu"): (14, 23, 608.0),
    ("qwen3_vl decoder with experts", "plain"): (117, 77, 2276.0),
    ("qwen3_vl decoder with experts", "gpu"): (70, 50, 784.0),
    ("qwen3_vl tower", "plain"): (53, 61, 832.0),
    ("qwen3_vl tower", "gpu"): (13, 25, 376.0),
    ("pi07 backbone", "plain"): (103, 106, 2176.0),
    ("pi07 backbone", "gpu"): (46, 62, 812.0),
    ("pi07 expert", "plain"): (71, 78, 1936.0),
    ("pi07 expert", "gpu"): (37, 49, 820.0),
    ("pi07 tower", "plain"): (40, 52, 576.0),
    ("pi07 tower", "gpu"): (12, 28, 376.0),
}


@pytest.mark.parametrize("kernels", ["plain", "gpu"])
@pytest.mark.parametrize("name", CASES)
def test_launches_and_kept_bytes_of_a_layer(name, kernels):
    case = CASES[name]()
    counts = case.counted(kernels)
    found = (*counts.launches, case.saved_per_token(counts))
    assert found == COUNTS[name, kernels], (counts.forward, counts.backward)


def test_a_kernel_more_is_counted(monkeypatch):
    case = CASES["qwen3_vl decoder"]()
    kernel = norm.rms_norm.kernels["gpu"]
    monkeypatch.setitem(norm.rms_norm.kernels, "gpu", lambda x, *rest: kernel(x * 1.5, *rest))
    # Three norms of a layer have no residual before them.
    forward, backward, _ = COUNTS["qwen3_vl decoder", "gpu"]
    assert case.counted("gpu").launches == (forward + 3, backward + 3)


def test_bytes_are_those_of_bfloat16_and_float32():
    x = paddle.randn([6, 8], dtype="float64")
    weight = paddle.ones([8], dtype="float64")
    x.stop_gradient = weight.stop_gradient = False
    counts = counted(lambda x: norm.rms_norm(x, weight, 1e-6), [x], "gpu", [weight])
    # The rows in bfloat16, and one float32 of each.
    assert counts.saved == 6 * (8 * 2 + 4)
    assert counts.forward == {"rms_norm": 1}
    assert counts.backward == {"rms_norm_grad": 2}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_neither_reads_the_device_nor_copies_from_the_host(name):
    case = CASES[name]()
    with halves_are("float64"), use_kernels("gpu"):
        case.run(*case.inputs)
        with forbid_host_reads(), record_device_copies() as copies:
            out = case.run(*case.inputs)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
    assert copies == []
