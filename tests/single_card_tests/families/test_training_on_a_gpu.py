"""Training steps through the kernels of a GPU, over stubs: parallel, recomputed, with experts."""

from functools import partial

import numpy as np
import pytest

from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.testing import (
    assert_equals_single_device,
    gather_gradients,
    tiny_pi07,
    tiny_pi07_batch,
    tiny_qwen3_vl,
    tiny_qwen3_vl_batch,
)
from paddle_vl.testing.qwen3_vl import EXPERTS
from tests.support.gpu_stubs.attention import FLASH
from tests.support.gpu_stubs.pretended import implementation

BUILDS = {
    "dense": tiny_qwen3_vl,
    "experts": partial(tiny_qwen3_vl, **EXPERTS),
    "pi07": tiny_pi07,
}


def step(name, model):
    if name == "pi07":
        losses = model(tiny_pi07_batch())
        return losses["MSE"] + losses["CE"]
    return model(**tiny_qwen3_vl_batch())


def loss_of(name, model):
    out = step(name, model)
    return out if name == "pi07" else out.loss


def gradients(name, *, recomputed: bool = False) -> dict:
    model = BUILDS[name]()
    model.train()
    if recomputed:
        recompute_layers([*model.vision_blocks, *model.decoder_layers])
    loss_of(name, model).backward()
    return gather_gradients([model])


@pytest.mark.parametrize("gpu", ["a100", "h100"])
@pytest.mark.parametrize("name", ["dense", "pi07"])
def test_ranks_equal_a_single_device(name, gpu):
    with implementation(gpu) as calls:
        assert_equals_single_device(BUILDS[name], partial(step, name), 2)
    assert {call.name for call in calls} <= set(FLASH)


@pytest.mark.parametrize("name", BUILDS)
def test_a_recomputed_step_equals_the_step(name):
    wanted = gradients(name)
    with implementation("a100") as calls:
        found = gradients(name, recomputed=True)
    assert {call.name for call in calls} <= set(FLASH)
    assert found.keys() == wanted.keys()
    largest = max(np.abs(gradient).max() for gradient in wanted.values())
    for parameter, gradient in wanted.items():
        # Entries far below the largest are rounding, such as those of a key's bias.
        np.testing.assert_allclose(
            found[parameter], gradient, rtol=1e-3, atol=1e-6 * largest, err_msg=parameter
        )


def test_a_step_that_leaves_flash_attention_is_noticed(monkeypatch):
    """Keys in another dtype than the queries, as a dropped cast would leave them."""
    from paddle_vl.nn import placement

    own = placement.causal_attention
    monkeypatch.setattr(
        placement,
        "causal_attention",
        lambda q, k, v, *rest: own(q.astype("float64"), k.astype("float64"), v.astype("float64"),
                                   *rest).astype(q.dtype),
    )  # fmt: skip
    with implementation("a100") as calls:
        gradients("dense")
    assert {call.name for call in calls} - set(FLASH) == {"math"}
