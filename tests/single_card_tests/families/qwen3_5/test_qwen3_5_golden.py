"""Equality of Qwen3.5 with the PyTorch original: every quantity and gradient of the golden cases.

Pinned here: what `tools/check_parity.py qwen3_5` compares, with the CPU kernels and with the plain
operations; that it notices a wrong weight, a state that leaks between packed samples, padding that
reaches the state, and an uncompared tensor.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paddle_vl.families.qwen3_5 import model as qwen3_5
from parity.comparison import CaseReport
from parity.golden import Qwen35Folders
from parity.qwen3_5 import run_cases
from tests.support import forked
from tests.support.implementations import implementation
from tests.support.tiny import GOLDEN

CASES = GOLDEN / "qwen3_5"
NAMES = [
    "gen_left_pad_batch", "gen_moe_one_image", "moe_multi_image", "multi_image_right_pad",
    "packed", "text_only", "tied_one_image",
]  # fmt: skip


def report_of(folder: Path, name: str) -> CaseReport:
    golden = Qwen35Folders([folder, CASES])
    (case,) = [c for c in golden.cases if c.name == name and folder in c.file.parents]
    (report,) = run_cases(golden, [case], 1.0, "float32")
    return report


@pytest.mark.parametrize("kernels", ["cpu", "compiled", "plain"])
@pytest.mark.parametrize("name", NAMES)
def test_golden_case(name, kernels):
    with implementation(kernels):
        report = report_of(CASES, name)
    assert report.passed, "\n".join([report.line(), *report.failure_lines()])


@pytest.mark.parametrize("model", ["dense_untied", "moe"])
def test_golden_training_trajectory(model):
    report = report_of(CASES, f"train_traj[{model}]")
    assert report.passed, "\n".join([report.line(), *report.failure_lines(20)])


def test_a_wrong_tensor_and_an_uncompared_one_fail(tmp_path):
    shutil.copytree(CASES / "text_only", tmp_path / "text_only")
    file = tmp_path / "text_only" / "tensors.safetensors"
    tensors = load_file(file)
    tensors["lm.g.0"] = tensors["lm.g.0"] + np.float32(1e-3)
    tensors["lm.something_new"] = tensors["logits"]
    save_file(tensors, file)
    report = report_of(tmp_path, "text_only")
    assert [quantity.name for quantity in report.failures] == ["lm.g.0", "lm.something_new"]


def test_padding_in_the_state_and_a_state_of_the_sample_before_are_noticed(monkeypatch):
    monkeypatch.setattr(qwen3_5, "real_tokens", lambda key_bias, length: None)
    assert not report_of(CASES, "gen_left_pad_batch").passed
    monkeypatch.undo()
    plain = qwen3_5.gated_delta_rule

    def leaking(q, k, v, decay, beta, state=None, packed=None, keeps_state=False):
        return plain(q, k, v, decay, beta, state, None, keeps_state)

    monkeypatch.setattr(qwen3_5, "gated_delta_rule", leaking)
    assert not report_of(CASES, "packed").passed


def test_the_command_prints_a_line_per_case_and_exits_zero():
    tool = Path(__file__).parents[4] / "tools" / "check_parity.py"
    done = forked.run([str(tool), "qwen3_5", str(CASES), "--case", "text_only"])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert lines[0].startswith("PASS text_only")
    assert lines[-1] == "1 passed, 0 failed"
