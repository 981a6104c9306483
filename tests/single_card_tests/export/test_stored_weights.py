"""Weights of an export in half precision.

Guarantees: answers are those of the model with rounded weights, which are rounded here by another
formula; the files have the size of the stored dtypes; the manifest and the command line tell how
much the answers change; the programs for GPUs are in bfloat16 and, with every bfloat16 replaced by
float32, give the answers of the others.
"""

import json
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle.base import core
from safetensors.numpy import load_file

from paddle_vl import PI07LowLevelPolicy
from paddle_vl.cli.main import main
from paddle_vl.export import load
from paddle_vl.export.folder import CHECK_FILE, ExportFolder, as_tensor
from paddle_vl.export.pi07.programs import policy_to_export
from paddle_vl.export.program import Program
from paddle_vl.export.qwen3_vl.programs import model_to_export
from paddle_vl.export.stored_weights import store_weights
from paddle_vl.export.writing import check_dtype, export_model
from paddle_vl.testing import qwen3_vl
from tests.single_card_tests.export.test_exported_pi07 import batch_of
from tests.single_card_tests.export.test_exported_qwen3_vl import BATCHES
from tests.single_card_tests.families.pi07.test_policy import character_tokenizer, golden_policy
from tests.single_card_tests.families.qwen3_vl.chat_builders import tiny_processor
from tests.support.exports import HOST_OPERATIONS, operations
from tests.support.tiny import tiny_model

NAMES = ("tower", "prefill", "decode")
EXPERTS = {**qwen3_vl.EXPERTS, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def half_experts(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("experts") / "out"
    model = tiny_model(vocab_size=320, **EXPERTS)
    to_export = model_to_export(model, tiny_processor().save_pretrained)
    export_model(to_export, Path("tiny"), out, dtype="bfloat16")
    return out


def with_rounded_weights(**text_overrides):
    """A model with weights that are rounded here."""
    model = tiny_model(vocab_size=320, **text_overrides)
    for parameter in model.parameters():
        parameter.set_value(parameter.astype("bfloat16").astype("float32"))
    return model


def test_weights_in_half_answer_like_the_model_with_rounded_weights(half_experts):
    check_answers(load(half_experts), with_rounded_weights(**EXPERTS), BATCHES["mixed"])


def check_answers(exported, rounded, batch) -> None:
    scores, wanted_scores = [], []
    found = exported.generate(**batch, max_new_tokens=9, on_logits=scores.append)
    wanted = rounded.generate(**batch, max_new_tokens=9, on_logits=wanted_scores.append)
    assert found.tolist() == wanted.tolist()
    np.testing.assert_allclose(scores, wanted_scores, rtol=1e-4, atol=1e-5)


def test_files_have_the_size_of_the_stored_weights(half_experts):
    sizes, count = {"tower": 0, "decoder": 0}, {"tower": 0, "decoder": 0}
    for name, parameter in tiny_model(vocab_size=320, **EXPERTS).named_parameters():
        part = "tower" if name.startswith("visual") else "decoder"
        sizes[part] += 2 * int(parameter.size)
        count[part] += 1
    for part, size in sizes.items():
        # A header of each tensor.
        found = (half_experts / f"{part}.pdiparams").stat().st_size
        assert size < found <= size + 64 * count[part], part


def test_the_manifest_tells_how_much_answers_change(half_experts):
    manifest = ExportFolder.open(half_experts).manifest
    exact = model_to_export(tiny_model(vocab_size=320, **EXPERTS), lambda _: None)
    stored = load_file(half_experts / CHECK_FILE)
    wanted = exact.programs["prefill"].answer()[0]
    difference = np.abs(stored["prefill.output.0"] - wanted)
    change = manifest.change["prefill"]
    assert change.largest == pytest.approx(difference.max(), rel=1e-3)
    assert change.mean == pytest.approx(difference.mean(), rel=1e-3)
    assert change.largest > 1e-4
    same = stored["prefill.output.0"].argmax(axis=-1) == wanted.argmax(axis=-1)
    assert change.equal_argmax == same.mean()
    assert manifest.change["tower"].equal_argmax is None
    assert manifest.dtype == "bfloat16"


class Retyped:
    """A program for GPUs with float32 in place of every bfloat16, and its weights in float32."""

    def __init__(self, folder: ExportFolder, name: str, out: Path):
        entry = folder.manifest.gpu[name]
        text = (folder.path / "gpu" / f"{name}.json").read_text()
        text = text.replace('"0.t_bf16"', '"0.t_f32"').replace('"bfloat16"', '"float32"')
        assert "bf" not in text.lower()
        (out / f"{name}.json").write_text(text)
        self.inputs = {
            key: (shape, dtype.replace("bfloat16", "float32"))
            for key, (shape, dtype) in entry.inputs.items()
        }
        self._write_weights(folder.path / entry.weights, text, out / entry.weights)
        self.run = Program(out / f"{name}.json", out / entry.weights, self.inputs)

    @staticmethod
    def _write_weights(stored: Path, text: str, out: Path) -> None:
        (block,) = json.loads(text)["program"]["regions"][0]["blocks"]
        names = sorted(op["A"][3] for op in block["ops"] if op["#"] == "p")
        scope = core.Scope()
        tensors = [scope.var(name).get_tensor() for name in names]
        for tensor in tensors:
            tensor.set(np.zeros([1], np.float32), core.CPUPlace())
        core.load_combine_func(str(stored), names, tensors, False, core.CPUPlace())
        wide = [paddle.to_tensor(tensor).astype("float32") for tensor in tensors]
        core.save_combine_func(
            [one.get_tensor() for one in wide], names, str(out), True, False, False
        )


@pytest.mark.parametrize("name", NAMES)
def test_programs_for_gpus_do_in_bfloat16_what_the_others_do(half_experts, name, tmp_path):
    folder = ExportFolder.open(half_experts)
    retyped, stored = Retyped(folder, name, tmp_path), load_file(half_experts / CHECK_FILE)
    given = {
        key: as_tensor(stored[f"{name}.input.{key}"], dtype)
        for key, (_, dtype) in retyped.inputs.items()
    }
    for i, found in enumerate(retyped.run(given)):
        wanted = stored[f"{name}.output.{i}"]
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_products_for_gpus_are_in_bfloat16_and_softmax_in_float32(half_experts, name):
    file = half_experts / "gpu" / f"{name}.json"
    (block,) = json.loads(file.read_text())["program"]["regions"][0]["blocks"]
    dtypes: dict[str, set] = {"matmul": set(), "softmax": set(), "cos": set()}
    for op in block["ops"]:
        kind = op["#"].rpartition(".")[2]
        if kind in dtypes:
            dtypes[kind] |= {op["O"][0]["TT"]["D"][0]["#"].removeprefix("0.t_")}
    assert dtypes == {"matmul": {"bf16"}, "softmax": {"f32"}, "cos": {"f32"}}
    assert not set(operations(file)) & {*HOST_OPERATIONS, "while"}


def test_the_manifest_says_that_programs_for_gpus_were_not_run(half_experts):
    manifest = ExportFolder.open(half_experts).manifest
    assert set(manifest.gpu) == set(NAMES)
    assert manifest.gpu["decode"].inputs["key_0"][1] == "bfloat16"
    assert manifest.programs["decode"].inputs["key_0"][1] == "float32"
    has_gpu = paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
    assert manifest.gpu_was_run == has_gpu


@pytest.mark.heavy
def test_a_policy_with_half_weights_acts_like_the_policy_with_rounded_weights(tmp_path, capsys):
    """Through the command line, from a checkpoint."""
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    golden = golden_policy(dataset_names=["a", "b"])
    golden.tokenizer, golden.action_tokenizer = character_tokenizer(), None
    golden.save_pretrained(checkpoint)
    policy = PI07LowLevelPolicy.from_pretrained(checkpoint)
    policy.eval()
    given = ["--model", str(checkpoint), "--output", str(out)]
    assert main(["export", *given, "--dtype", "float16"]) == 0
    printed = capsys.readouterr().out
    assert "actions: float16 weights change the answer to the stored input by " in printed
    batch, noise = batch_of(3)
    exact = policy.sample_actions(batch, noise)
    store_weights(policy_to_export(policy).programs.values(), "float16")
    found = load(out).sample_actions(batch, noise)
    np.testing.assert_allclose(found, policy.sample_actions(batch, noise), rtol=0, atol=1e-5)
    assert 1e-6 < np.abs(found - exact).max() < 0.5
    assert ExportFolder.open(out).manifest.change["actions"].largest > 0


@pytest.mark.heavy
def test_the_command_line_reports_the_change(tmp_path, capsys):
    tiny_model(vocab_size=320).save_pretrained(tmp_path / "checkpoint")
    tiny_processor().save_pretrained(tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "config.json"
    names = ("vision_start", "vision_end", "image", "video")
    ids = {f"{name}_token_id": 294 + i for i, name in enumerate(names)}
    file.write_text(json.dumps(json.loads(file.read_text()) | ids))
    given = ["--model", str(tmp_path / "checkpoint"), "--output", str(tmp_path / "out")]
    assert main(["export", *given, "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    assert "prefill: bfloat16 weights change the answer to the stored input by 0.0" in printed
    assert "of the most likely tokens are the same" in printed
    if not paddle.is_compiled_with_cuda():
        assert "compute in bfloat16 (traced here, not run: there is no GPU)" in printed


def test_weights_beyond_float16_are_refused():
    layer = paddle.nn.Linear(2, 2)
    layer.weight.set_value(paddle.full([2, 2], 1e5))
    with pytest.raises(ValueError, match=r"has values up to 1e\+05, above 65504: use bfloat16"):
        store_weights([layer], "float16")


def test_stored_weights_in_onnx_and_unknown_dtypes_are_refused():
    with pytest.raises(ValueError, match="'int4': use one of float32, float16, bfloat16"):
        check_dtype("int4")
    with pytest.raises(ValueError, match="leave --dtype bfloat16 out"):
        check_dtype("bfloat16", onnx=True)
