"""Runs of a small PaddleOCR-VL from files: parts and layouts of folders, and its programs."""

import re
from pathlib import Path
from shutil import copytree, ignore_patterns

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl import PaddleOCRVLForConditionalGeneration
from paddle_vl.cli.main import main
from paddle_vl.config.load import load_run_config
from paddle_vl.export import load
from paddle_vl.families.paddleocr_vl.checkpoint_map import key_here
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from scale.families import sized_family
from tests.single_card_tests.train.tiny_run import MODEL_OCR, write_tiny_run
from tests.single_card_tests.train.whole_runs import assert_same_run, build
from tests.support.exports import needs_onnx

RESUMED = ("train.save_steps=2", "train.resume_from_checkpoint=auto")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    model = MODEL_OCR | {"num_hidden_layers": 2}
    return write_tiny_run(tmp_path_factory.mktemp("run"), model=model)


@pytest.fixture(scope="module")
def trained(run_file, tmp_path_factory) -> Path:
    """A run of the decoder alone, whose folders are in transformers' layout; its folder has the
    weights from before, too."""
    folder = tmp_path_factory.mktemp("trained") / "out"
    settings = ("model.save_layout=transformers", "model.freeze=[vision, mergers]")
    trainer = build(run_file, folder, *settings, *RESUMED)
    trainer.runner.model.save_pretrained(folder.with_name("before"))
    trainer.run()
    return folder


def test_parts_are_the_tower_the_projector_and_the_decoder(trained):
    before, after = (
        {key_here(k): a for k, a in load_file(folder / "model.safetensors").items()}
        for folder in (trained.with_name("before"), trained / "final")
    )
    same = {key for key, array in before.items() if np.array_equal(after[key], array)}
    assert same == {key for key in before if key.startswith(("visual.", "mlp_AR."))}


def test_a_checkpoint_of_either_layout_continues_to_the_bit(run_file, trained, tmp_path):
    before = trained / "checkpoint-2" / "model.safetensors"
    assert "model.projector.linear_1.weight" in load_file(before)
    (tmp_path / "out").mkdir()
    for name in ("checkpoint-2", "metrics.jsonl"):
        (tmp_path / "out" / name).symlink_to(trained / name)
    settings = ("model.save_layout=transformers", "model.freeze=[vision, mergers]")
    build(run_file, tmp_path / "out", *settings, *RESUMED).run()
    assert_same_run(trained, tmp_path / "out", begun_anew="sequence_length")


def test_a_question_to_a_folder_with_files_of_another_model_is_refused(trained, tmp_path, capsys):
    copytree(trained / "final", tmp_path / "m", ignore=ignore_patterns("manifest.json"))
    file = tmp_path / "m" / "preprocessor_config.json"
    file.write_text(re.sub(r'("patch_size": )\d+', r"\g<1>28", file.read_text()))
    assert main(["generate", "--model", str(tmp_path / "m"), "--prompt", "?"]) == 1
    assert "vision_config.patch_size is 4 in the model and 28 in the" in capsys.readouterr().err


def test_a_reference_that_a_metric_cannot_use_is_named_before_the_model_is_loaded(
    trained, tmp_path, capsys
):
    copytree(
        trained / "final", tmp_path / "m", ignore=ignore_patterns("*.safetensors", "manifest.json")
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"query": "?", "response": "{text}"}}\n' for text in ("a", " ")))
    command = ["evaluate", str(tmp_path / "m"), "--data", str(rows), "--metrics", "ned", "cer"]
    assert main(command) == 1
    assert f"{rows}:2: metric cer: a reference is empty" in capsys.readouterr().err


def test_words_of_other_trainers_are_answered_with_the_settings(run_file):
    for theirs, ours in (
        ("freeze_vision=true", "model.freeze=[vision]"),
        ("freeze_aligner=true", "model.freeze=[mergers]"),
        ("freeze_llm=true", "model.freeze=[language]"),
        ("freeze_config=freeze_vision", "model.freeze"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"did you mean {ours}?")):
            load_run_config(run_file, [theirs])


def test_the_published_size_is_simulated_with_little_width(run_file):
    config = load_run_config(run_file, ["model.config=paddleocr-vl", "parallel.mp_degree=2"])
    family = sized_family(config, 1)
    text, vision = family.model_config.text_config, family.model_config.vision_config
    assert (text.num_hidden_layers, vision.depth) == (18, 27)
    assert (text.hidden_size, text.num_key_value_heads, vision.hidden_size) == (16, 2, 8)
    assert family.widenings == {3: 1024 // 16, 5: 1152 // 8}


@pytest.mark.parametrize(
    "runtime",
    ["paddle", pytest.param("onnxruntime", marks=[needs_onnx, pytest.mark.heavy])],
)
def test_programs_answer_as_the_model_does(run_file, trained, tmp_path, runtime):
    arguments = ["export", "--model", str(trained / "final"), "--output", str(tmp_path / "out")]
    assert main(arguments + ["--onnx"] * (runtime != "paddle")) == 0
    model = PaddleOCRVLForConditionalGeneration.from_pretrained(trained / "final")
    processor = VLProcessor.from_pretrained(trained / "final")
    pictures = [str(file) for file in sorted((run_file.parent / "images").iterdir())[:3]]
    inputs = processor(
        messages=[
            [{"role": "user", "content": "<image><image>Which?"}],
            [{"role": "user", "content": "<image>Which colour?"}],
            [{"role": "user", "content": "Sure?"}],
        ],
        images=[pictures[:2], pictures[2:], []],
    )
    logits: tuple[list, list] = ([], [])
    length = {"max_new_tokens": 5, "min_new_tokens": 5}
    found, wanted = (
        each.generate(**inputs, **length, on_logits=kept.append)
        for each, kept in zip((load(tmp_path / "out", runtime), model), logits, strict=True)
    )
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-5)
