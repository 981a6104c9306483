"""pi07 equals PyTorch: every quantity and every gradient of the golden cases.

Guarantees: what `tools/check_parity.py pi07` compares, with the CPU kernels under both settings of
Paddle's stride kernels, with the compiled ones, with the plain operations, and with the kernels of
an A100 and an H100, stubs in place of those that a CPU lacks; files that a case names may be in
another folder; a wrong value, a tensor that was not compared and a case of unknown kind fail.
"""

import json
import shutil

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from parity.comparison import CaseReport
from parity.golden import PI07Folders
from parity.pi07 import run_cases
from tests.support.gpu_stubs.attention import FLASH
from tests.support.implementations import implementation
from tests.support.pi07_golden import CASES
from tests.support.tiny import IMPLEMENTATIONS

NAMES = sorted(file.stem for file in CASES.glob("*.json"))


def report_of(name: str, *folders) -> CaseReport:
    """The report of a case of the first folder."""
    golden = PI07Folders(list(folders))
    case = next(case for case in golden.cases if case.name == name)
    return next(run_cases(golden, [case], 1.0, "float32"))


def explained(report: CaseReport) -> str:
    return "\n".join([report.line(), *report.failure_lines()])


@pytest.mark.parametrize(("kernels", "strides"), IMPLEMENTATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_golden_case(name, kernels, strides):
    kept = paddle.get_flags("FLAGS_use_stride_kernel")
    paddle.set_flags({"FLAGS_use_stride_kernel": strides})
    try:
        with implementation(kernels) as calls:
            report = report_of(name, CASES)
    finally:
        paddle.set_flags(kept)
    # A GPU leaves flash attention nowhere.
    assert {call.name for call in calls or ()} <= set(FLASH)
    assert report.passed, explained(report)


def copied(name: str, folder, change) -> None:
    """A copy of a case with changed tensors."""
    shutil.copy(CASES / f"{name}.json", folder)
    tensors = load_file(CASES / f"{name}.safetensors")
    change(tensors)
    save_file(tensors, folder / f"{name}.safetensors")


def test_what_a_case_points_to_may_lie_in_another_folder(tmp_path):
    copied("10_sample_all_fields", tmp_path, lambda tensors: None)
    assert report_of("10_sample_all_fields", tmp_path, CASES).passed
    report = report_of("10_sample_all_fields", tmp_path)
    assert not report.passed
    assert "01_all_fields.safetensors is in none of the folders" in report.line()


def test_wrong_and_uncompared_values_fail(tmp_path):
    def change(tensors):
        tensors["out.step2.v_t"] = tensors["out.step2.v_t"] + np.float32(1e-3)
        tensors["out.something_new"] = tensors["out.actions"]

    copied("10_sample_all_fields", tmp_path, change)
    report = report_of("10_sample_all_fields", tmp_path, CASES)
    assert [q.name for q in report.failures] == ["out.step2.v_t", "out.something_new"]


def test_wrong_gradients_and_frozen_parameters_fail(tmp_path):
    def change(tensors):
        tensors["grad.state_proj.bias"] *= np.float32(1.001)

    copied("06_train_expert_only", tmp_path, change)
    file = tmp_path / "06_train_expert_only.json"
    meta = json.loads(file.read_text())
    meta["params_requires_grad_false"].pop()
    file.write_text(json.dumps(meta))
    report = report_of("06_train_expert_only", tmp_path, CASES)
    assert {q.name for q in report.failures} == {"grad.state_proj.bias", "frozen parameters"}


def test_layers_that_keep_the_current_frames_are_compared_in_their_rows(tmp_path):
    """T=2: rows of the past frames are not computed behind the last layer that reads them."""

    def change(tensors, row):
        tensors["T2.layer2"][row] += np.float32(1e-2)

    copied("15_video_encoder", tmp_path, lambda tensors: change(tensors, row=0))
    assert report_of("15_video_encoder", tmp_path, CASES).passed
    copied("15_video_encoder", tmp_path, lambda tensors: change(tensors, row=1))
    report = report_of("15_video_encoder", tmp_path, CASES)
    assert [(q.group, q.name) for q in report.failures] == [
        ("layers of current frames", "T2.layer2")
    ]


def test_unknown_kinds_are_reported_and_fail(tmp_path):
    (tmp_path / "99_other.json").write_text('{"kind": "other"}')
    report = report_of("99_other", tmp_path)
    assert "a case of kind 'other'" in report.line()
    assert not report.passed
