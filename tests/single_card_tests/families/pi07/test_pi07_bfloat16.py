"""The casts of a bfloat16 pi07, checked by the dtype of every operator that a GPU would run.

Guarantees, for both attention implementations, with plain operators and with the fused kernels of a
GPU (forward, and backward of every hand-written gradient): norms, rotary embedding in plain
operators, scores and softmax composed of them, the flow and both losses run in float32, the time
embedding in float64; all other products, attention, and tensors between layers and between pipeline
stages stay in bfloat16; no operator mixes dtypes; removing any single cast makes these tests fail.

A bfloat16 pi07 is as close to float32 as OpenTau's own bfloat16 is.

Bfloat16 is emulated on the CPU: see `paddle_vl.testing.bfloat16`.
"""

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.families.pi07.pipeline import PI07Stage
from paddle_vl.families.pi07.prefix import Presence
from paddle_vl.nn.linear import default_dtype
from paddle_vl.testing import emulated_bfloat16
from tests.support.gpu_stubs.attention import FLASH
from tests.support.pi07_golden import case, config_values, golden_batch, golden_model
from tests.support.traced import Cast, Operator, trace

WIDE = {"rsqrt", "cos", "sin", "softmax", "cross_entropy_with_softmax", "square", "mean"}
NARROW = {
    *("gelu", "silu", "embedding", "pool2d", "layer_norm", "fused_rotary_position_embedding"),
    *FLASH,
}
# Rows, and a float32 scale that keeps the product in float32.
SCALED = Operator("fused_rms_norm_ext", ("bfloat16", "float32"), ("float32", "float32"))
LAYERS, TOWER_LAYERS = 2, 2
EVERYTHING = Presence(True, True, True)


def model_and_batch(implementation: str) -> tuple[PI07LowLevelFlowMatching, dict[str, Any]]:
    """Model and batch of case 01 with fewer layers: three frames, every optional field."""
    description, _ = case("01_all_fields")
    values = config_values(description, attention_implementation=implementation)
    vlm = values["vlm_config"]
    vlm["attention_implementation"] = implementation
    backbone = vlm["gemma3_config"]
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    backbone["text_config"] |= {"num_hidden_layers": LAYERS} | kinds
    backbone["vision_config"]["num_hidden_layers"] = TOWER_LAYERS
    vlm["gemma_expert_config"]["num_hidden_layers"] = LAYERS
    with default_dtype("bfloat16"):
        model = PI07LowLevelFlowMatching(
            PI07Config.from_dict(values), description["config"]["indicator_token_ids"]
        )

    def fed(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [fed(f"{name}{i}", each) for i, each in enumerate(value)]
        return paddle.static.data(name, list(value.shape), str(value.dtype))

    return model, {name: fed(name, value) for name, value in golden_batch().items()}


def run_model(implementation: str) -> None:
    model, batch = model_and_batch(implementation)
    model(batch, EVERYTHING, per_sample=True)


def violations(
    operators: list[Operator], casts: list[Cast], implementation: str, kernels: str = "gpu"
) -> list[str]:
    """Violations of the dtype rules, as messages."""
    found = []
    for name, takes, gives in operators:
        if name in WIDE and "bfloat16" in takes + gives:
            found.append(f"{name} in bfloat16")
        if name in NARROW and "float32" in takes + gives:
            found.append(f"{name} in float32")
        if name == SCALED.name and (takes, gives) != SCALED[1:]:
            found.append(f"{name} of {takes}")
    wide_products = operators.count(Operator("matmul", ("float32",) * 2, ("float32",)))
    # Attention scores of both streams, where no kernel computes them.
    if wide_products != (2 * LAYERS if (implementation, kernels) == ("eager", "plain") else 0):
        found.append(f"{wide_products} products in float32")
    widened = sum(op == Operator("cast", ("bfloat16",), ("float32",)) for op in operators)
    if widened != len(casts):
        found.append(f"{widened} values became float32, {len(casts)} of them by a cast")
    return found


@pytest.fixture(scope="module", params=[("eager", "gpu"), ("sdpa", "gpu"), ("eager", "plain")])
def traced(request):
    implementation, kernels = request.param
    return *request.param, *trace(lambda: run_model(implementation), chosen=kernels)


def test_every_operator_has_the_dtype_it_should(traced):
    implementation, kernels, operators, casts = traced
    assert violations(operators, casts, implementation, kernels) == []
    names = Counter(op.name for op in operators)
    # Norms: 6 per backbone layer, 2 per expert layer, a final one each; 2 per tower layer, the
    # tower's last one and the projector's, in one pass of videos and subgoals.
    gemma_norms, tower_norms = 8 * LAYERS + 3, 2 * TOWER_LAYERS + 1
    if kernels == "gpu":
        assert names["fused_rms_norm_ext"] == gemma_norms
        assert names["layer_norm"] == tower_norms
        assert names["fused_rotary_position_embedding"] == 4 * LAYERS
    assert names["rsqrt"] == (0 if kernels == "gpu" else gemma_norms + tower_norms)
    # Two rotary bases per stream in float32, and the time embedding.
    for name in ("cos", "sin"):
        dtypes = Counter(op.gives for op in operators if op.name == name)
        assert dtypes == {("float32",): 4, ("float64",): 1}
    composed = (implementation, kernels) == ("eager", "plain")
    assert names["softmax"] == (2 * LAYERS if composed else 0)
    # Two streams in every layer, patches in every tower layer and past frames in every second.
    of_towers = TOWER_LAYERS + TOWER_LAYERS // 2
    assert sum(names[name] for name in FLASH) == of_towers + (0 if composed else 2 * LAYERS)
    assert names["math"] == names["memory_efficient_attention"] == 0
    loss = next(op for op in operators if op.name == "cross_entropy_with_softmax")
    assert loss.gives == ("float32", "float32")


def test_stages_of_a_pipeline_exchange_bfloat16():
    def run_stages() -> None:
        model, batch = model_and_batch("eager")
        batch |= {"presence": EVERYTHING, "delay": paddle.static.data("delay", [2], "int64")}
        arrived_R = PI07Stage(model, range(1))(batch)
        assert "bfloat16" in str(arrived_R.dtype).lower()
        PI07Stage(model, range(1, LAYERS))(batch, arrived_R)

    assert violations(*trace(run_stages), "eager") == []


def test_no_cast_can_be_dropped():
    tried: set[Cast] = set()
    for kernels, fewest in (("plain", 9), ("gpu", 5)):
        # Eager attention has all casts of sdpa and more.
        run = partial(trace, partial(run_model, "eager"), chosen=kernels)
        casts = set(run()[1])
        assert len(casts) >= fewest
        for cast in sorted(casts - tried):
            try:
                found = violations(*run(dropped=cast), "eager", kernels)
            except TypeError as error:
                # Paddle's CPU build lacks this kernel in bfloat16.
                found = ["bfloat16"] if "dtype: bfloat16" in str(error) else []
            assert found, cast
        tried |= casts


# Of the golden README: losses, and the norm of the worst gradient.
LOSS, GRADIENT = 2e-3, 6e-2


def run(dtype: str, implementation: str) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Losses and gradients of case 01, from its weights rounded to bfloat16."""
    with emulated_bfloat16(), default_dtype(dtype):
        model = golden_model(attention_implementation=implementation)
        with paddle.no_grad():
            for parameter in model.parameters():
                paddle.assign(parameter.astype("bfloat16").astype(dtype), parameter)
        losses = model(golden_batch())
        (losses["MSE"] + losses["CE"]).backward()
    gradients = {
        name: parameter.grad.astype("float32").numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {name: losses[name].item() for name in ("MSE", "CE")}, gradients


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_losses_and_gradients_are_those_of_float32_but_for_rounding(implementation):
    losses, narrow = run("bfloat16", implementation)
    wide_losses, wide = run("float32", implementation)
    assert losses == pytest.approx(wide_losses, rel=LOSS)
    assert losses != wide_losses
    assert narrow.keys() == wide.keys()
    distances = {}
    for name, wanted in wide.items():
        # The gradient of a key's bias is zero but for rounding.
        like = wide[name.replace("k_proj.bias", "q_proj.bias")]
        distances[name] = np.linalg.norm(narrow[name] - wanted) / np.linalg.norm(like)
    assert {name: away for name, away in distances.items() if not away <= GRADIENT} == {}
