"""LoRA runs from files, and runs with learning rates per component.

Guarantees: only the adapters and their optimizer state are trained and saved, never the base model;
a resumed run is bit-identical, also with dropout; evaluate, generate and merge take the run's
folder and find the base model, also after a move; the metrics have the rate of each component;
invalid settings are refused before anything is built.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.cli.main import main
from paddle_vl.config.load import load_run_config
from paddle_vl.families.vlm.folders.processor_fit import model_config
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_run import MODEL, write_tiny_run

LORA = "model.lora={r: 2, target_modules: [q_proj, down_proj, qkv], modules_to_save: [mergers]}"
FACTORS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    """Settings of a run next to a base model, whose folder has the processor."""
    path = write_tiny_run(tmp_path_factory.mktemp("run"))
    processor = VLProcessor.from_pretrained(path.with_name("processor"))
    model = Qwen3VLForConditionalGeneration.from_config(
        model_config(Qwen3VLConfig, MODEL, processor)
    )
    model.save_pretrained(path.with_name("base"))
    processor.save_pretrained(path.with_name("base"))
    return path


def overrides(run_file: Path, output_dir: Path, *more: str) -> list[str]:
    return [
        f"train.output_dir={output_dir}", "model.config=null", "data.processor=null",
        f"model.pretrained={run_file.with_name('base')}", LORA, *more,
    ]  # fmt: skip


def train(run_file: Path, output_dir: Path, *more: str) -> None:
    config = load_run_config(run_file, overrides(run_file, output_dir, *more))
    assert build_trainer(config).run() is None


@pytest.fixture(scope="module", params=["lora", "dora, mergers frozen at first"])
def settings(request, run_file) -> list[str]:
    more = ["train.save_steps=2", "model.lora.lora_dropout=0.3", "train.recompute=full"]
    if request.param != "lora":
        more += ["model.lora.use_dora=true", "train.unfreeze=[{at: 3, patterns: [mergers]}]"]
        more += ["train.layer_decay={language: 0.8}"]
    return [*more, f"data.eval=[{run_file.with_name('test.jsonl')}]"]


@pytest.fixture(scope="module")
def trained(run_file, settings, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("trained") / "out"
    train(run_file, output_dir, *settings)
    return output_dir


def test_files_hold_the_adapters_and_the_state_of_what_trains(trained, run_file):
    for folder in (trained / "checkpoint-4", trained / "final"):
        names = {path.name for path in folder.iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
        assert not {"config.json", "model.safetensors"} & names
    values = json.loads((trained / "final" / "adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == str(run_file.with_name("base").resolve())
    adapter = load_file(trained / "checkpoint-4" / "adapter_model.safetensors")
    names = {key.removeprefix("base_model.model.") for key in adapter}
    assert all(name.endswith(FACTORS) or "merger" in name for name in names)
    state = load_file(trained / "checkpoint-4" / "optimizer.safetensors")
    assert {name.rpartition("/")[0] for name in state} == names
    for name, array in adapter.items():
        assert np.abs(array).max() > 0, name


def test_a_resumed_run_is_bit_identical(trained, settings, run_file, tmp_path):
    shutil.copytree(trained / "checkpoint-2", tmp_path / "checkpoint-2")
    train(run_file, tmp_path, *settings, "train.resume_from_checkpoint=auto")
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        expected, found = (load_file(f / "checkpoint-4" / name) for f in (trained, tmp_path))
        assert found.keys() == expected.keys()
        for key, array in expected.items():
            np.testing.assert_array_equal(found[key], array, err_msg=key)


def test_another_adapter_cannot_continue(trained, run_file, tmp_path):
    shutil.copytree(trained / "checkpoint-2", tmp_path / "checkpoint-2")
    more = ["model.lora.r=3", "train.resume_from_checkpoint=auto", "train.save_steps=2"]
    with pytest.raises(ValueError, match=r"model\.lora\.r: 2 -> 3"):
        train(run_file, tmp_path, *more)


def test_evaluate_generate_and_merge_take_the_run(trained, run_file, tmp_path, capsys):
    data = ["--data", str(run_file.with_name("test.jsonl")), "--max-new-tokens", "1"]
    line = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    expected = f"loss per answer token: {line['eval_loss']:.4f}"
    assert main(["evaluate", str(trained), *data]) == 0
    assert expected in capsys.readouterr().out
    merged = tmp_path / "merged"
    assert main(["merge", str(trained), str(merged)]) == 0
    assert str(run_file.with_name("base")) in capsys.readouterr().out
    assert main(["evaluate", str(merged), *data]) == 0
    assert expected in capsys.readouterr().out
    # The base names no end tokens; all folders have the processor's.
    processor = VLProcessor.from_pretrained(merged)
    for folder in (trained / "final", trained / "checkpoint-2", merged):
        settings = json.loads((folder / "generation_config.json").read_text())
        assert settings["eos_token_id"] == processor.eos_token_ids
        loaded = Qwen3VLForConditionalGeneration.from_pretrained(folder)
        assert loaded.generation_config.eos_token_ids == processor.eos_token_ids
    answers = []
    for folder in (trained, merged):
        prompt = ["--prompt", "Which colour?", "--max-new-tokens", "4"]
        assert main(["generate", "--model", str(folder), *prompt]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    for arguments, message in (
        (["merge", str(trained), str(merged)], "is not empty"),
        (["merge", str(merged), str(tmp_path / "other")], "nothing to merge"),
        (["evaluate", str(merged), *data, "--base", str(merged)], "is a full model"),
    ):
        assert main(arguments) == 1
        assert message in capsys.readouterr().err


def test_an_adapter_without_processor_files_uses_its_bases(trained, run_file, tmp_path, capsys):
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(trained / "final" / name, adapter / name)
    shutil.copytree(run_file.with_name("base"), base)
    values = json.loads((adapter / "adapter_config.json").read_text())
    values["base_model_name_or_path"] = "elsewhere"
    (adapter / "adapter_config.json").write_text(json.dumps(values))
    arguments = ["generate", "--model", str(adapter), "--prompt", "x", "--max-new-tokens", "1"]
    assert main(arguments) == 1
    assert "elsewhere, which" in capsys.readouterr().err
    assert main([*arguments, "--base", str(base)]) == 0
    assert main(["merge", str(adapter), str(tmp_path / "merged"), "--base", str(base)]) == 0
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


def test_rates_of_parts_are_in_the_metrics(run_file, tmp_path):
    more = ["train.part_learning_rates={vision: 0.001, '*.lora_B.*': 0.02}", "train.max_steps=3"]
    train(run_file, tmp_path, *more)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # Warmup starts at 0 in the first step and reaches the peak in the second.
    assert [line["learning_rate"] for line in lines][:2] == [0, 0.01]
    assert [line["learning_rate/vision"] for line in lines][:2] == [0, pytest.approx(0.001)]
    assert lines[1]["learning_rate/*.lora_B.*"] == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.pretrained=null", "model.config={}"], r"model\.pretrained is not set"),
        (["model.lora.target_modules=[q_porj]"], "'q_porj' fits none"),
        (["model.lora.rank=3"], r"model\.lora\.rank is not a setting"),
        (["model.lora.lora_alfa=3"], r"did you mean model\.lora\.lora_alpha\?"),
        (["model.lora.r=0"], r"model\.lora\.r is 0; it must be at least"),
        (["model.lora={r: 2}"], r"model\.lora\.target_modules is missing"),
        (["model.freeze=[vision, mergers, language]"], "nothing to train"),
        (["train.part_learning_rates={language: 0}"], "it must be above 0"),
        (["train.part_learning_rates={visoin: 0.1}"], r"called 'visoin'; did you mean vision\?"),
        (["train.part_learning_rates={'model.language_model.norm.*': 0.1}"], "among what is train"),
        (["train.part_learning_rates={vision: 0.1}", "train.learning_rate=0"], "which is 0"),
        (["train.unfreeze=[{at: 4, patterns: [mergers]}]"], "after 4 steps, but the run"),
        (["train.unfreeze=[{at: 1, patterns: [vision, mergers, language]}]"], "every trained"),
        (["train.unfreeze=[{at: 1, patterns: [visoin]}]"], r"called 'visoin'; did you mean vis"),
        (["train.layer_decay={mergers: 0.9}"], "'mergers' matches no parameter of a layer"),
        (["train.layer_decay={vision: 1.5}"], "it must be at most 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(run_file, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        train(
            run_file, tmp_path, "data.processor=" + str(run_file.with_name("processor")), *settings
        )
