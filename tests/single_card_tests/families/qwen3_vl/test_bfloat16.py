"""The casts of a bfloat16 model, checked by the dtype of every operator that a GPU would run.

Norms, the tower's rotation in plain operators, position interpolation, routing and loss run in
float32; matrix products, attention and tensors between layers stay in bfloat16; no operator mixes
dtypes; removing any single cast makes these tests fail."""

from collections import Counter
from functools import partial

import paddle
import pytest

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.nn.linear import default_dtype
from paddle_vl.testing.qwen3_vl import EXPERTS
from tests.single_card_tests.train.batches import image_fields
from tests.support.gpu_stubs.attention import FLASH
from tests.support.tiny import tiny_config
from tests.support.traced import Cast, Operator, trace

HOST = ("image_grid_thw", "num_target_tokens", "has_left_padding")
# Operators that must never see bfloat16, and those that must never see float32.
WIDE = {"rsqrt", "cos", "sin", "exp", "log", "softmax", "cross_entropy_with_softmax"}
NARROW = {
    *("matmul", "swiglu", "gelu", "scatter", "index_add", *FLASH),
    *("layer_norm", "fused_rotary_position_embedding", "grouped_linear"),
}


def run_model(**text_settings) -> None:
    batch = image_fields([[1, 2, 3, 4], [5, 6, 7]], [2, 1])
    with default_dtype("bfloat16"):
        model = Qwen3VLForConditionalGeneration(tiny_config(**text_settings))
    inputs = {
        name: paddle.static.data(name, list(array.shape), str(array.dtype))
        for name, array in batch.items()
        if name not in HOST
    }
    model(**inputs, **{name: batch[name] for name in HOST})


def violations(operators: list[Operator], casts: list[Cast]) -> list[str]:
    """Violations of the dtype rules, as messages."""
    found = []
    for name, takes, gives in operators:
        if name in WIDE and "bfloat16" in takes + gives:
            found.append(f"{name} in bfloat16")
        if name in NARROW and "float32" in takes + gives:
            found.append(f"{name} in float32")
    widened = sum(op == Operator("cast", ("bfloat16",), ("float32",)) for op in operators)
    if widened != len(casts):
        found.append(f"{widened} values became float32, {len(casts)} of them by a cast")
    return found


MODELS = {"dense": run_model, "experts": partial(run_model, **EXPERTS)}
CASES = [(model, kernels) for model in MODELS for kernels in ("gpu", "plain")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def traced(request):
    model, kernels = request.param
    run = partial(trace, MODELS[model], chosen=kernels)
    return kernels, run, *run()


def test_every_operator_has_the_dtype_it_should(traced):
    kernels, _, operators, casts = traced
    assert violations(operators, casts) == []
    names = Counter(op.name for op in operators)
    config = tiny_config()
    layers, blocks = config.text_config.num_hidden_layers, config.vision_config.depth
    # One of a layer's norms comes after a residual.
    fused = {
        "rms_norm": 3 * layers + 1,
        "fused_rms_norm": layers,
        "layer_norm": 2 * blocks + 3,
        "fused_rotary_position_embedding": 2 * (layers + blocks),
    }
    is_fused = kernels == "gpu"
    assert {name: names[name] for name in fused} == {
        name: number * is_fused for name, number in fused.items()
    }
    assert names["rsqrt"] == (0 if is_fused else 4 * layers + 1 + 2 * blocks + 3)
    assert sum(names[name] for name in FLASH) == layers + blocks
    assert names["math"] == names["memory_efficient_attention"] == 0
    assert names["cos"] == names["sin"] == 2
    # Table lookups at four taps, and their weights.
    assert Counter(op.takes for op in operators if op.name == "embedding") == {
        ("int64", "bfloat16"): 1,
        ("int64", "float32"): 4,
    }
    loss = next(op for op in operators if op.name == "cross_entropy_with_softmax")
    assert loss.gives == ("float32", "float32")


def test_no_cast_can_be_dropped(traced):
    kernels, run, _, casts = traced
    assert len(set(casts)) >= (2 if kernels == "gpu" else 6)
    for cast in sorted(set(casts)):
        try:
            found = violations(*run(dropped=cast))
        except TypeError as error:
            # Paddle's CPU build lacks this kernel in bfloat16.
            found = ["bfloat16"] if "dtype: bfloat16" in str(error) else []
        assert found, cast
