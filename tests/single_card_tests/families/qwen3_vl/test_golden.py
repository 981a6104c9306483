"""Equality with the PyTorch original: every quantity and every gradient of the golden cases.

Pinned here: what `tools/check_parity.py` compares, with the CPU kernels under both settings of
Paddle's stride kernels, with the compiled ones, with the plain operations, and with the kernels of
an A100 and an H100, stubs in place of those that a CPU lacks; and that the tool notices: a wrong
weight, an unsupported model, an uncompared tensor, no case.
"""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from parity.comparison import CaseReport
from parity.golden import QwenFolders
from parity.qwen_vl import run_cases
from tests.support import forked
from tests.support.gpu_stubs.attention import FLASH
from tests.support.implementations import implementation
from tests.support.tiny import GOLDEN, IMPLEMENTATIONS

ROOT = Path(__file__).parents[4]
CASES = GOLDEN / "qwen_vl"
NAMES = [
    "gen_moe_one_image", "gen_one_image", "mixed_image_video", "moe_aux_left",
    "multi_image_right_pad", "packed", "processor", "some_without_image", "text_only",
    "tied_one_image",
]  # fmt: skip


def reports(folder: Path, name: str) -> list[CaseReport]:
    golden = QwenFolders([folder, CASES])
    cases = [case for case in golden.cases if case.name == name and folder in case.file.parents]
    return list(run_cases(golden, cases, 1.0, "float32"))


@pytest.mark.parametrize(("kernels", "strides"), IMPLEMENTATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_golden_case(name, kernels, strides):
    kept = paddle.get_flags("FLAGS_use_stride_kernel")
    paddle.set_flags({"FLAGS_use_stride_kernel": strides})
    try:
        with implementation(kernels) as calls:
            found = reports(CASES, name)
    finally:
        paddle.set_flags(kept)
    # A GPU leaves flash attention nowhere.
    assert {call.name for call in calls or ()} <= set(FLASH)
    assert found
    for report in found:
        assert report.passed, "\n".join([report.line(), *report.failure_lines()])


# Each model and each kernel; the golden cases run all of them with all.
@pytest.mark.parametrize(
    ("kernels", "model"),
    [("compiled", "dense_untied"), ("cpu", "dense_tied"), ("plain", "moe"), ("a100", "moe")],
)
def test_golden_training_trajectory(model, kernels):
    with implementation(kernels):
        (report,) = [r for r in reports(CASES, "train_traj") if r.name == f"train_traj[{model}]"]
    assert report.passed, "\n".join([report.line(), *report.failure_lines(20)])


def test_what_is_not_supported_is_reported_and_fails(tmp_path):
    shutil.copytree(CASES / "models" / "dense_tied", tmp_path / "models" / "older")
    config_file = tmp_path / "models" / "older" / "config.json"
    values = json.loads(config_file.read_text()) | {"model_type": "qwen2_vl"}
    config_file.write_text(json.dumps(values))
    for name, model in (("on_older", "older"), ("on_nothing", "absent")):
        case = Path(shutil.copytree(CASES / "text_only", tmp_path / name))
        meta = json.loads((case / "meta.json").read_text()) | {"model": model}
        (case / "meta.json").write_text(json.dumps(meta))
    (report,) = reports(tmp_path, "on_older")
    assert "model type qwen2_vl" in report.line()
    assert not report.passed
    (report,) = reports(tmp_path, "on_nothing")
    assert "model absent is in none of the folders" in report.line()
    assert not report.passed


def test_a_wrong_tensor_and_an_uncompared_one_fail(tmp_path):
    shutil.copytree(CASES / "text_only", tmp_path / "text_only")
    file = tmp_path / "text_only" / "tensors.safetensors"
    tensors = load_file(file)
    tensors["lm.attn_out.2"] = tensors["lm.attn_out.2"] + np.float32(1e-3)
    tensors["lm.something_new"] = tensors["logits"]
    save_file(tensors, file)
    (report,) = reports(tmp_path, "text_only")
    assert [quantity.name for quantity in report.failures] == ["lm.attn_out.2", "lm.something_new"]


def run_tool(*arguments: str) -> subprocess.CompletedProcess:
    return forked.run([str(ROOT / "tools" / "check_parity.py"), *arguments])


def test_the_command_prints_a_line_per_case_and_exits_zero():
    done = run_tool("qwen_vl", str(CASES), "--case", "text_only")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert lines[0].startswith("PASS text_only")
    assert lines[-1] == "1 passed, 0 failed"


def test_the_command_exits_one_without_a_case(tmp_path):
    done = run_tool("qwen_vl", str(tmp_path))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "0 passed, 0 failed"
