"""The doctor's stored cases.

Guarantees: both pass here; a changed loss, logit, gradient or token is found and named; the formula
of weights gives fixed values; the files are small enough for a wheel and part of it.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paddle_vl.doctor import golden
from paddle_vl.doctor.check import Machine

ROOT = Path(__file__).parents[3]


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine("cpu", 0, False, True, tmp_path)


def test_hfs_case_passes(machine):
    result = golden.golden_qwen3_vl(machine)
    assert result.status == "ok", result.found
    assert result.figures["error"] < 2e-5


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("loss", "loss by"),
        ("logits", "logits by"),
        ("grad.model.visual.blocks.1.attn.qkv.weight", "model.visual.blocks.1.attn.qkv.weight"),
        ("model.language_model.layers.1.self_attn.q_norm.weight", "differs from HF's"),
        ("tokens", "greedy tokens"),
    ],
)
def test_a_changed_value_is_found(machine, tmp_path, name, where):
    arrays, config, made_with = golden.read_case(golden.QWEN3_VL)
    array = arrays[name].copy()
    array.flat[array.size // 2] += 1 if array.dtype == np.int64 else np.abs(array).max() * 1e-3
    file = tmp_path / "changed.safetensors"
    save_file({**arrays, name: array}, file, {"config": config, "made_with": made_with})
    result = golden.golden_qwen3_vl(machine, file=file)
    assert result.status == "wrong"
    assert where in result.found
    assert result.remedy


def test_the_policys_case_passes_and_a_changed_value_is_found(machine, tmp_path, monkeypatch):
    # One forward and backward pass for all comparisons.
    values = golden.pi07_values()
    monkeypatch.setattr(golden, "pi07_values", lambda: values)
    assert golden.golden_pi07(machine).status == "ok"
    stored = json.loads(golden.PI07.read_text())
    projection = next(name for name in stored if name.endswith("q_proj.weight.projection"))
    for name in ("MSE", "CE", projection):
        file = tmp_path / "changed.json"
        norm = stored.get(name.replace("projection", "norm"), stored[name])
        file.write_text(json.dumps({**stored, name: stored[name] + 1e-3 * norm}))
        result = golden.golden_pi07(machine, file)
        where = name.removesuffix(".projection")
        assert (result.status, where in result.found) == ("wrong", True)


def test_the_formula_of_weights_is_fixed():
    found = golden.formula(4, 7)
    assert found.dtype == np.float32
    assert golden.formula(1000, 1).min() >= -1
    assert golden.formula(1000, 1).max() < 1
    assert abs(float(golden.formula(10**5, 2).mean())) < 0.01
    np.testing.assert_array_equal(found, golden.formula(400, 7)[:4])
    assert not np.array_equal(found, golden.formula(4, 8))


def test_the_cases_are_small_and_part_of_the_wheel():
    files = list(golden.CASES.iterdir())
    assert sum(file.stat().st_size for file in files) < 300_000
    assert '"paddle_vl.doctor" = ["cases/*"]' in (ROOT / "pyproject.toml").read_text()
