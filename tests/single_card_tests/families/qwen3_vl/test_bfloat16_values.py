"""Bfloat16 numbers are as close to HF's as those of HF's two attention forms to each other.

Bfloat16 is emulated on the CPU: see `paddle_vl.testing.bfloat16`.
"""

import json

import numpy as np
import paddle
import pytest

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.checkpoint.safetensors_io import read_header
from paddle_vl.testing.bfloat16 import emulated_bfloat16
from tests.support.tiny import GOLDEN

REFERENCE = GOLDEN / "qwen_vl_bfloat16"
# Of HF's own distance: independent errors of one size are apart by the root of two times that size.
ALLOWED = 1.5
HOST = ("image_grid_thw", "video_grid_thw")


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def run(case: str, dtype: str) -> tuple[float, dict[str, np.ndarray]]:
    """Loss; logits at real tokens and gradients under HF's names."""
    folder = GOLDEN / "qwen_vl" / case
    name = json.loads((folder / "meta.json").read_text())["model"]
    inputs = {
        key[3:]: stored.read()
        for key, stored in read_header(folder / "tensors.safetensors").items()
        if key in ("in.input_ids", "in.attention_mask", "in.labels", "in.pixel_values")
        or key[3:] in HOST
    }
    with emulated_bfloat16():
        model = Qwen3VLForConditionalGeneration.from_pretrained(
            GOLDEN / "qwen_vl" / "models" / name, dtype=dtype
        )
        output = model(**{k: v if k in HOST else paddle.to_tensor(v) for k, v in inputs.items()})
        output.loss.backward()
    assert all(str(p.dtype) == f"paddle.{dtype}" for p in model.parameters())
    real_BL = inputs["attention_mask"].astype(bool)
    found = {"logits": output.logits.astype("float32").numpy()[real_BL]}
    for item in model.stored_parameters():
        grad = item.parameter.grad.astype("float32").numpy()
        found[f"grad.{item.key}"] = item.layout.to_stored(item.of_own(grad))
    return output.loss.item(), found


@pytest.mark.parametrize("case", ["multi_image_right_pad", "moe_aux_left"])
def test_rounding_separates_it_from_hf_no_more_than_hf_from_itself(case):
    loss, found = run(case, "bfloat16")
    wide_loss, wide = run(case, "float32")
    meta = json.loads((REFERENCE / f"{case}.json").read_text())
    real_BL = read_header(GOLDEN / "qwen_vl" / case / "tensors.safetensors")
    real_BL = real_BL["in.attention_mask"].read().astype(bool)
    stored = read_header(REFERENCE / f"{case}.safetensors")
    assert len(stored) == len(meta["spread"]) > 10
    ratios = {}
    for name, tensor in stored.items():
        wanted = tensor.read()
        wanted = wanted[real_BL] if name == "logits" else wanted
        own = max(meta["spread"][name], meta["distance_to_float32"][name])
        ratios[name] = distance(found[name], wanted) / own
        ratios[f"{name} to float32"] = distance(found[name], wide[name]) / own
    losses = meta["loss"]
    assert wide_loss == pytest.approx(losses["float32"], abs=1e-5)
    own = max(abs(value - losses["float32"]) for value in losses.values())
    ratios["loss"] = abs(loss - wide_loss) / own
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= ALLOWED} == {}
