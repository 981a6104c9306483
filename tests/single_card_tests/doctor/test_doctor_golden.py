"""The doctor's golden cases.

Guarantees: both pass here; a changed loss, logit, gradient or token is found and named; the stored
file is small enough for a wheel and part of it.
"""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paddle_vl.doctor import golden

ROOT = Path(__file__).parents[3]
QWEN3_VL, QWEN3_5 = golden.CASES


@pytest.mark.parametrize("case", golden.CASES)
def test_hfs_case_passes(machine, case):
    result = golden.check_case(case, "float32", machine)
    assert result.status == "ok", result.found
    assert result.figures["error"] < 2e-5


@pytest.mark.parametrize(
    ("case", "name", "where"),
    [
        (QWEN3_VL, "loss", "loss by"),
        (QWEN3_VL, "logits", "logits by"),
        (QWEN3_VL, "grad.model.visual.blocks.1.attn.qkv.weight", "blocks.1.attn.qkv.wei"),
        (QWEN3_VL, "model.language_model.layers.1.self_attn.q_norm.weight", "from HF's"),
        (QWEN3_VL, "tokens", "greedy tokens"),
        (QWEN3_5, "model.language_model.layers.0.linear_attn.dt_bias", "from HF's"),
        (QWEN3_5, "grad.model.language_model.layers.2.linear_attn.A_log", "A_log by"),
        (QWEN3_5, "tokens", "greedy tokens"),
    ],
)
def test_a_changed_value_is_found(machine, tmp_path, case, name, where):
    arrays, config, made_with = golden.read_case(case)
    array = arrays[name].copy()
    array.flat[array.size // 2] += 1 if array.dtype == np.int64 else np.abs(array).max() * 1e-3
    file = tmp_path / "changed.safetensors"
    save_file({**arrays, name: array}, file, {"config": config, "made_with": made_with})
    result = golden.check_case(file, "float32", machine)
    assert result.status == "wrong"
    assert where in result.found
    assert result.remedy


def test_the_cases_are_small_and_part_of_the_wheel():
    assert QWEN3_VL.stat().st_size < 300_000
    assert QWEN3_5.stat().st_size < 300_000
    assert '"paddle_vl.doctor" = ["cases/*"]' in (ROOT / "pyproject.toml").read_text()
