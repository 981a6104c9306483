"""An exported Qwen3-VL answers as the model does, without the model's code.

Guarantees: equal tokens at shapes that the export has not seen, with images, videos, both, text
alone, left padding, sampling and buffers that grow; a process without the model's code gives the
same; damaged, forged or mismatched folders are refused by name; a program has no control flow.
All tests share one export.
"""

import importlib.util
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

import paddle_vl
from paddle_vl.checkpoint.manifest import file_sum
from paddle_vl.cli.main import main
from paddle_vl.compat import configure_cpu_runtime
from paddle_vl.export import load, program
from paddle_vl.export.folder import CHECK_FILE, MANIFEST_FILE, ExportFolder
from paddle_vl.export.qwen3_vl.programs import model_to_export
from paddle_vl.export.writing import export_model
from paddle_vl.testing.qwen3_vl import EXPERTS, patches, token_rows
from tests.single_card_tests.families.qwen3_vl.chat_builders import (
    random_image,
    tiny_processor,
    user,
)
from tests.support.exports import (
    HAS_ONNX,
    RUNTIMES,
    host_waits,
    operations,
    output_without_model_code,
)
from tests.support.tiny import tiny_model

STRIDE_KERNELS = "FLAGS_use_stride_kernel"
MODEL_CODE = ("model", "decoder", "layers", "moe", "generate", "programs")


@pytest.fixture(scope="module")
def exported(request, folder):
    return load(folder, getattr(request, "param", "paddle"))


def batch(*rows, images=None, videos=None, left_padding=0) -> dict:
    ids_BL = token_rows(*rows)
    mask_BL = np.ones_like(ids_BL)
    if left_padding:
        ids_BL[1] = np.roll(ids_BL[1], left_padding)
        mask_BL[1, :left_padding] = 0
    given = {"input_ids": ids_BL, "attention_mask": mask_BL}
    if images:
        given["pixel_values"], given["image_grid_thw"] = patches(images)
    if videos:
        given["pixel_values_videos"], given["video_grid_thw"] = patches(videos, seed=1)
    return given


BATCHES = {
    "text": batch([1, 2, 3, 4, 5]),
    # Fewer queries than the prefill has blocks of them.
    "token": batch([7]),
    "tokens": batch([7, 8, 9], [2, 3, 4]),
    "image": batch([1, ("image", 4), 5, 6, 7, 8, 9], images=[[1, 4, 4]]),
    "images": batch(
        [1, ("image", 6), 5, ("image", 1), 8], images=[[1, 4, 6], [1, 2, 2]]
    ),
    "video": batch([1, ("video", 2), 5, ("video", 2), 8], videos=[[2, 2, 4]]),
    "mixed": batch(
        [1, ("video", 4), 7, ("image", 4), 3],
        [2, 3, ("image", 1), 5, ("video", 1), 5, 7, 8, 9, 1, 2],
        images=[[1, 4, 4], [1, 2, 2]], videos=[[1, 4, 4], [1, 2, 2]],
    ),
    "padded": batch(
        [1, 2, 3, 4, 5, 6, 7, 8], [("image", 2), 3, 4], images=[[1, 2, 4]], left_padding=4
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("exported", RUNTIMES, indirect=True)
def test_tokens_are_those_of_the_model(model, exported, name):
    scores, wanted_scores = [], []
    found = exported.generate(**BATCHES[name], max_new_tokens=9, on_logits=scores.append)
    wanted = model.generate(**BATCHES[name], max_new_tokens=9, on_logits=wanted_scores.append)
    assert found.tolist() == wanted.tolist()
    np.testing.assert_allclose(scores, wanted_scores, rtol=1e-4, atol=1e-5)


def test_buffers_grow_when_an_answer_is_longer(model, exported, monkeypatch):
    monkeypatch.setattr("paddle_vl.export.qwen3_vl.exported._CHUNK", 3)
    drawn = {"do_sample": True, "seed": 3, "temperature": 1.5}
    for settings in ({}, drawn, {"eos_token_id": 5}):
        settings = {**BATCHES["padded"], "max_new_tokens": 20, **settings}
        assert exported.generate(**settings).tolist() == model.generate(**settings).tolist()


def test_a_process_without_the_models_code_gives_the_same_tokens(model, folder, tmp_path):
    np.savez(tmp_path / "batch.npz", **BATCHES["mixed"])
    script = f"""
import numpy as np
from paddle_vl.compat import configure_cpu_runtime
from paddle_vl.export import load, program
print(load({str(folder)!r}).generate(**np.load("batch.npz"), max_new_tokens=9).tolist())
"""
    found = output_without_model_code("qwen3_vl", MODEL_CODE, script, tmp_path)
    wanted = model.generate(**BATCHES["mixed"], max_new_tokens=9)
    assert found == wanted.tolist()


# The prompt's visual tokens are counted, and a step is told where it writes.
WAITS = {
    "tower": {},
    "prefill": {"nonzero": 1},
    "decode": {"set_value_with_tensor_ of place": 2 * 3},
}


def check_program(file: Path) -> None:
    assert {"matmul", "softmax"} <= set(operations(file))
    assert host_waits(file) == WAITS[file.stem]


@pytest.mark.parametrize("name", WAITS)
def test_a_program_has_no_control_flow_and_no_host_operation(folder, name):
    check_program(folder / f"{name}.json")


def copied(folder: Path, out: Path) -> Path:
    return Path(shutil.copytree(folder, out))


@pytest.mark.parametrize("name", ["decoder.pdiparams", "prefill.json", "tokenizer.json"])
def test_damaged_and_missing_files_are_named(folder, tmp_path, name):
    damaged = copied(folder, tmp_path / "damaged")
    content = bytearray((damaged / name).read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / name).write_bytes(bytes(content))
    with pytest.raises(RuntimeError, match=name):
        load(damaged)
    (damaged / name).unlink()
    with pytest.raises(RuntimeError, match=name):
        load(damaged)


def with_sums(folder: Path) -> None:
    """Write the manifest again for the files as they are."""
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    for name in manifest["files"]:
        sum_ = file_sum(folder / name)
        manifest["files"][name] = {"size": sum_.size, "xxh3_128": sum_.checksum}
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))


def test_a_program_that_answers_wrongly_is_refused_at_load(folder, tmp_path):
    from safetensors.numpy import load_file, save_file

    wrong = copied(folder, tmp_path / "wrong")
    stored = load_file(wrong / CHECK_FILE)
    stored["prefill.output.0"] = stored["prefill.output.0"] + np.float32(0.01)
    save_file(stored, wrong / CHECK_FILE)
    with_sums(wrong)
    with pytest.raises(RuntimeError, match=r"output 0 of prefill differs by 0\.01"):
        load(wrong)


def test_programs_of_another_export_are_refused(folder, tmp_path):
    mixed = copied(folder, tmp_path / "mixed")
    (mixed / "decode.json").write_bytes((mixed / "prefill.json").read_bytes())
    with_sums(mixed)
    with pytest.raises(RuntimeError, match="decode does not run on the input in check.safetensors"):
        ExportFolder.open(mixed).program("decode")


# What is wrong in the manifest, by the text of the refusal.
FORGED = {
    "its files have no": {"files": {}},
    "outside the folder": {"files": {"../decoder.pdiparams": {"size": 1, "xxh3_128": ""}}},
    "its files have no '../other.pdiparams'": {"programs.tower.weights": "../other.pdiparams"},
    r"decode: inputs: input_ids\[1\] is 'text'; it must be 'float32', ": {
        "programs.decode.inputs.input_ids": [[-1], "text"]
    },
    "num_outputs is 0": {"programs.decode.num_outputs": 0},
    r"inputs: input_ids\[0\] is 'a'; it must be a list": {
        "programs.decode.inputs": {"input_ids": ["a", "int64"]}
    },
    "merge is 0": {"sizes.merge": 0},
    "'other' is unknown, with the value 1": {"sizes.other": 1},
    "a version of a runtime is missing": {"versions": {}},
    r"tokenizer\.json is not among the files": {"files.tokenizer.json": None},
}


@pytest.mark.parametrize("text", FORGED)
def test_a_forged_manifest_is_refused(folder, tmp_path, text):
    forged = copied(folder, tmp_path / "forged")
    values = json.loads((forged / MANIFEST_FILE).read_text())
    for place, value in FORGED[text].items():
        # Names of files have points of their own.
        keys = place.split(".", 1) if place.startswith("files") else place.split(".")
        inner = values
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        if value is None:
            del inner[keys[-1]]
    (forged / MANIFEST_FILE).write_text(json.dumps(values))
    with pytest.raises(RuntimeError, match=text) as caught:
        load(forged)
    assert str(forged) in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "renamed", "empty"])
def test_a_damaged_check_file_is_refused_by_name(folder, tmp_path, damage):
    damaged = copied(folder, tmp_path / "damaged")
    file = damaged / CHECK_FILE
    content = file.read_bytes()
    changed = {
        "cut": content[:-1],
        "renamed": content.replace(b"tower.output.0", b"tower.output.9"),
        "empty": b"",
    }
    file.write_bytes(changed[damage])
    with_sums(damaged)
    with pytest.raises(RuntimeError, match=r"check\.safetensors"):
        load(damaged)


def test_loading_tunes_the_cpu_kernels_and_sets_threads(folder, monkeypatch):
    monkeypatch.setattr(program, "_threads", None)
    kept = paddle.get_flags(STRIDE_KERNELS)
    paddle.set_flags({STRIDE_KERNELS: True})
    try:
        load(folder, num_threads=2)
        assert program.num_threads() == 2
        assert not paddle.get_flags(STRIDE_KERNELS)[STRIDE_KERNELS]
    finally:
        paddle.set_flags(kept)
        configure_cpu_runtime(1)
    with pytest.raises(ValueError, match="num_threads is 0: give at least 1"):
        load(folder, num_threads=0)


@pytest.mark.parametrize(
    ("variables", "takes_all"),
    [({}, True), ({"OMP_NUM_THREADS": "1"}, False), ({"PADDLE_TRAINERS_NUM": "2"}, False)],
)
def test_all_cores_are_taken_unless_the_environment_says_otherwise(
    variables, takes_all, monkeypatch
):
    """As in a process that has not imported Paddle."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "paddle")
    spec: Any = importlib.util.find_spec("paddle_vl.export")
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert fresh._takes_all_cores == takes_all


def test_the_manifest_says_what_is_in_the_folder(folder):
    weights = sorted(path.name for path in folder.glob("*.pdiparams"))
    assert weights == ["decoder.pdiparams", "tower.pdiparams"]
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    assert manifest["model_type"] == "qwen3_vl"
    assert manifest["versions"]["paddle_vl"] == paddle_vl.__version__
    assert manifest["programs"]["prefill"]["inputs"]["input_ids"] == [[-1, -1], "int64"]
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == files - {MANIFEST_FILE}


def test_what_cannot_be_is_refused(exported, model, folder, tmp_path):
    with pytest.raises(ValueError, match="prefill_chunk_size is 4, but an exported prefill runs"):
        exported.stream(**BATCHES["text"], prefill_chunk_size=4)
    given = {name: BATCHES["image"][name] for name in ("input_ids", "attention_mask")}
    with pytest.raises(
        ValueError, match="4 image placeholder tokens in input_ids but image_grid_thw .* 0"
    ):
        exported.generate(**given)
    with pytest.raises(ValueError, match=r"has no export\.json: give a folder of paddle-vl export"):
        load(tmp_path)
    values = json.loads((folder / MANIFEST_FILE).read_text()) | {"format": 99}
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(values))
    with pytest.raises(ValueError, match="not of format 2"):
        load(tmp_path)
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        export_model(model_to_export(model, lambda _: None), Path("tiny"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_FILE]


def test_the_processor_answers_messages(exported):
    """Ids of the tiny processor are not the tiny model's; the inputs are, so text comes out."""
    pieces = list(exported.answer([user("What is this?")], max_new_tokens=4))
    assert "".join(pieces) == exported.ask([user("What is this?")], max_new_tokens=4)
    with pytest.raises(ValueError, match="2 image place.* 1 entries"):
        exported.ask([user("<image><image>Same?")], [random_image(8, 8)])


def test_an_export_chats(exported, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is this?\n"))
    chat = ["chat", str(folder), "--max-new-tokens", "4"]
    assert main(chat) == 0
    wanted = exported.ask([user("What is this?")], max_new_tokens=4)
    assert capsys.readouterr().out == f"{wanted}\n"
    assert main([*chat, "--base", "b"]) == 1
    message = "error: an export has its own weights and chat template: leave --base out"
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.heavy
def test_a_model_with_experts_is_exported_too(tmp_path):
    """Fewer assignments than experts, and more: the number of rows of a block differs."""
    model = tiny_model(vocab_size=320, **EXPERTS)
    to_export = model_to_export(model, tiny_processor().save_pretrained)
    export_model(to_export, Path("tiny"), tmp_path, onnx=HAS_ONNX)
    for name in ("prefill", "decode"):
        check_program(tmp_path / f"{name}.json")
    for runtime in ("paddle", "onnxruntime") if HAS_ONNX else ("paddle",):
        exported = load(tmp_path, runtime)
        for name in ("text", "mixed", "padded"):
            scores, wanted_scores = [], []
            settings = {**BATCHES[name], "max_new_tokens": 9}
            found = exported.generate(**settings, on_logits=scores.append)
            wanted = model.generate(**settings, on_logits=wanted_scores.append)
            assert found.tolist() == wanted.tolist()
            np.testing.assert_allclose(scores, wanted_scores, rtol=1e-4, atol=1e-5)
