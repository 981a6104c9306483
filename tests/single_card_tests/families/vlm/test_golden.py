"""Equality with the PyTorch originals: every quantity and every gradient of the golden cases of
Qwen3-VL, Qwen3.5, PaddleOCR-VL and Qwen4-Exp, with the kernels of a CPU, compiled and not, the
plain operations, and those of an A100 and an H100, stubs in place of those that a CPU lacks; and
that the tool notices faults."""

import json
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from paddle_vl.nn import delta_rule
from parity import paddleocr_vl, qwen3_5, qwen4_exp, qwen_vl
from parity.comparison import CaseReport
from tests.support import forked
from tests.support.gpu_stubs.attention import FLASH
from tests.support.implementations import implementation
from tests.support.tiny import GOLDEN, IMPLEMENTATIONS

# Of every family: what compares its cases, their names, and the kernels that they run with.
FAMILIES: dict[str, tuple[ModuleType, list[str], list[tuple[str, bool]]]] = {
    "qwen_vl": (
        qwen_vl,
        ["gen_moe_one_image", "gen_one_image", "mixed_image_video", "moe_aux_left",
         "multi_image_right_pad", "packed", "processor", "some_without_image", "text_only",
         "tied_one_image"],
        IMPLEMENTATIONS,
    ),
    "qwen3_5": (
        qwen3_5,
        ["gen_left_pad_batch", "gen_moe_one_image", "moe_multi_image", "multi_image_right_pad",
         "packed", "text_only", "tied_one_image"],
        [("cpu", True), ("compiled", True), ("plain", True)],
    ),
    "paddleocr_vl": (
        paddleocr_vl,
        ["gen_left_pad_batch", "gen_tied", "multi_image_right_pad", "packed",
         "some_without_image", "text_only", "tied_one_image"],
        [("cpu", True), ("compiled", True), ("plain", True)],
    ),
    "qwen4_exp": (
        qwen4_exp,
        ["gen_left_pad_batch", "gen_one_image", "gen_sparse", "long_text", "multi_image_left_pad",
         "ngram_hash", "one_image", "packed", "packed_text", "pieces", "pieces_video", "ple_rows",
         "sparse_images", "sparse_text_left_pad", "video"],
        [("cpu", True), ("compiled", True), ("plain", True)],
    ),
}  # fmt: skip


def reports(family: str, name: str, folder: Path | None = None) -> list[CaseReport]:
    parity, cases = FAMILIES[family][0], GOLDEN / family
    golden = parity.FOLDERS([folder or cases, cases])
    chosen = [c for c in golden.cases if c.name == name and (folder or cases) in c.file.parents]
    return list(parity.run_cases(golden, chosen, 1.0, "float32"))


def assert_passed(found: list[CaseReport]) -> None:
    assert found
    for report in found:
        assert report.passed, "\n".join([report.line(), *report.failure_lines(20)])


@pytest.mark.parametrize(
    ("family", "name", "kernels", "strides"),
    [
        (family, name, *how)
        for family, (_, names, ways) in FAMILIES.items()
        for name in names
        for how in ways
    ],
)
def test_golden_case(family, name, kernels, strides):
    paddle.set_flags({"FLAGS_use_stride_kernel": strides})
    with implementation(kernels) as calls:
        found = reports(family, name)
    # A GPU leaves flash attention nowhere.
    assert {call.name for call in calls or ()} <= set(FLASH)
    assert_passed(found)


# Each model and each kernel; the golden cases run all of them with all.
@pytest.mark.parametrize(
    ("family", "case", "model", "kernels"),
    [
        ("qwen_vl", "train_traj", "dense_untied", "compiled"),
        ("qwen_vl", "train_traj", "dense_tied", "cpu"),
        ("qwen_vl", "train_traj", "moe", "plain"),
        ("qwen_vl", "train_traj", "moe", "a100"),
        ("qwen3_5", "train_traj[dense_untied]", "dense_untied", "compiled"),
        ("qwen3_5", "train_traj[moe]", "moe", "compiled"),
        ("paddleocr_vl", "train_traj[tied]", "tied", "compiled"),
        ("qwen4_exp", "train_traj[full]", "full", "compiled"),
        ("qwen4_exp", "train_traj[ple]", "ple", "compiled"),
        ("qwen4_exp", "train_traj[sparse]", "sparse", "compiled"),
    ],
)
def test_golden_training_trajectory(family, case, model, kernels):
    with implementation(kernels):
        found = reports(family, case)
    assert_passed([report for report in found if report.name == f"train_traj[{model}]"])


def test_what_is_not_supported_is_reported_and_fails(tmp_path):
    cases = GOLDEN / "qwen_vl"
    shutil.copytree(cases / "models" / "dense_tied", tmp_path / "models" / "older")
    config_file = tmp_path / "models" / "older" / "config.json"
    values = json.loads(config_file.read_text()) | {"model_type": "qwen2_vl"}
    config_file.write_text(json.dumps(values))
    for model, told in (
        ("older", "model type qwen2_vl"),
        ("absent", "model absent is in none of the folders"),
    ):
        case = Path(shutil.copytree(cases / "text_only", tmp_path / f"on_{model}"))
        meta = json.loads((case / "meta.json").read_text()) | {"model": model}
        (case / "meta.json").write_text(json.dumps(meta))
        (report,) = reports("qwen_vl", f"on_{model}", tmp_path)
        assert told in report.line()
        assert not report.passed


@pytest.mark.parametrize(
    ("family", "wrong"),
    [("qwen_vl", "lm.attn_out.2"), ("qwen3_5", "lm.g.0"), ("paddleocr_vl", "lm.layer_out.2")],
)
def test_a_wrong_tensor_and_an_uncompared_one_fail(family, wrong, tmp_path):
    shutil.copytree(GOLDEN / family / "text_only", tmp_path / "text_only")
    file = tmp_path / "text_only" / "tensors.safetensors"
    tensors = load_file(file)
    tensors[wrong] = tensors[wrong] + np.float32(1e-3)
    tensors["lm.something_new"] = tensors["logits"]
    save_file(tensors, file)
    (report,) = reports(family, "text_only", tmp_path)
    assert [quantity.name for quantity in report.failures] == [wrong, "lm.something_new"]


def test_padding_in_the_state_and_a_state_of_the_sample_before_are_noticed(monkeypatch):
    monkeypatch.setattr(delta_rule, "real_tokens", lambda key_bias, length: None)
    assert not reports("qwen3_5", "gen_left_pad_batch")[0].passed
    monkeypatch.undo()
    plain = delta_rule.gated_delta_rule

    def leaking(q, k, v, decay, beta, state=None, packed=None, keeps_state=False):
        return plain(q, k, v, decay, beta, state, None, keeps_state)

    monkeypatch.setattr(delta_rule, "gated_delta_rule", leaking)
    assert not reports("qwen3_5", "packed")[0].passed


@pytest.mark.parametrize(
    ("family", "has_case"), [("qwen_vl", True), ("qwen3_5", True), ("qwen_vl", False)]
)
def test_the_command_prints_a_line_per_case_and_exits_one_without_any(family, has_case, tmp_path):
    tool = Path(__file__).parents[4] / "tools" / "check_parity.py"
    folder = GOLDEN / family if has_case else tmp_path
    done = forked.run([str(tool), family, str(folder), "--case", "text_only"])
    assert done.returncode == (0 if has_case else 1), done.stderr
    assert done.stdout.startswith("PASS text_only") == has_case
    assert done.stdout.splitlines()[-1] == f"{int(has_case)} passed, 0 failed"
