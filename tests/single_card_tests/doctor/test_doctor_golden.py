"""The doctor's golden cases.

Guarantees: both pass here; a changed loss, logit, gradient or token is found and named; the stored
file is small enough for a wheel and part of it.
"""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paddle_vl.doctor import models

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("check", [models.golden_qwen3_vl, models.golden_qwen3_5])
def test_hfs_case_passes(machine, check):
    result = check(machine)
    assert result.status == "ok", result.found
    assert result.figures["error"] < 2e-5


@pytest.mark.parametrize(
    ("case", "name", "where"),
    [
        (models.QWEN3_VL, "loss", "loss by"),
        (models.QWEN3_VL, "logits", "logits by"),
        (models.QWEN3_VL, "grad.model.visual.blocks.1.attn.qkv.weight", "blocks.1.attn.qkv.wei"),
        (models.QWEN3_VL, "model.language_model.layers.1.self_attn.q_norm.weight", "from HF's"),
        (models.QWEN3_VL, "tokens", "greedy tokens"),
        (models.QWEN3_5, "model.language_model.layers.0.linear_attn.dt_bias", "from HF's"),
        (models.QWEN3_5, "grad.model.language_model.layers.2.linear_attn.A_log", "A_log by"),
        (models.QWEN3_5, "tokens", "greedy tokens"),
    ],
)
def test_a_changed_value_is_found(machine, tmp_path, case, name, where):
    arrays, config, made_with = models.read_case(case)
    array = arrays[name].copy()
    array.flat[array.size // 2] += 1 if array.dtype == np.int64 else np.abs(array).max() * 1e-3
    file = tmp_path / "changed.safetensors"
    save_file({**arrays, name: array}, file, {"config": config, "made_with": made_with})
    result = models.golden_qwen3_vl(machine, file=file)
    assert result.status == "wrong"
    assert where in result.found
    assert result.remedy


def test_a_policy_equals_the_hosts_and_a_changed_value_is_found(machine, monkeypatch):
    values = models.pi07_values
    assert models.golden_pi07(machine).status == "ok"
    runs = []

    def changed(model):
        """The second time, on the device under test."""
        runs.append(values(model))
        name = next(name for name in runs[0] if name.endswith("q_proj.weight"))
        if len(runs) > 1:
            runs[1][name] = runs[1][name] + 1e-3 * np.abs(runs[1][name]).max()
        return runs[-1]

    monkeypatch.setattr(models, "pi07_values", changed)
    result = models.golden_pi07(machine)
    assert (result.status, "q_proj.weight by" in result.found) == ("wrong", True)


def test_the_cases_are_small_and_part_of_the_wheel():
    assert models.QWEN3_VL.stat().st_size < 300_000
    assert models.QWEN3_5.stat().st_size < 300_000
    assert '"paddle_vl.doctor" = ["cases/*"]' in (ROOT / "pyproject.toml").read_text()
