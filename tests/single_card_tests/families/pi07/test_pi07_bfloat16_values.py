"""A bfloat16 pi07 is as close to float32 as OpenTau's own bfloat16 is.

Bfloat16 is emulated on the CPU: see `paddle_vl.testing.bfloat16`.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.checkpoint.reading import fill_parameters
from paddle_vl.checkpoint.safetensors_io import read_header
from paddle_vl.families.pi07.checkpoint_map import engine_keys
from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.nn.linear import default_dtype
from paddle_vl.testing import emulated_bfloat16
from tests.single_card_tests.families.pi07.test_pi07_bfloat16 import CAMERA_FIELDS
from tests.support.pi07_golden import CASES, case, config_values

# Of the golden README: losses, and the norm of the worst gradient.
LOSS, GRADIENT = 2e-3, 6e-2


def run(dtype: str, implementation: str) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Losses and gradients of case 01, from its weights rounded to bfloat16."""
    description, tensors = case("01_all_fields")
    values = config_values(description, attention_implementation=implementation)
    values["vlm_config"]["attention_implementation"] = implementation
    batch = {name[3:]: value for name, value in tensors.items() if name.startswith("in.")}
    for many, one in CAMERA_FIELDS.items():
        batch[many] = [batch.pop(f"{one}{i}") for i in range(description["n_cams"])]
    with emulated_bfloat16(), default_dtype(dtype):
        model = PI07LowLevelFlowMatching(
            PI07Config.from_dict(values), description["config"]["indicator_token_ids"]
        )
        stored = engine_keys(read_header(CASES / description["weights_file"]))
        fill_parameters(model.stored_parameters(), stored)
        with paddle.no_grad():
            for parameter in model.parameters():
                paddle.assign(parameter.astype("bfloat16").astype(dtype), parameter)
        losses = model(batch)
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
