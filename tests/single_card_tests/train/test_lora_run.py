"""LoRA runs from files: what they save, and the commands that take their folders."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.cli.main import main
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from tests.single_card_tests.train.run_kinds import write_lora_run
from tests.single_card_tests.train.whole_runs import build

FACTORS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_lora_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module", params=["lora", "dora"])
def trained(request, run_file, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("trained") / "out"
    settings = ["train.save_steps=2", f"data.eval=[{run_file.with_name('test.jsonl')}]"]
    if request.param == "dora":
        settings.append("model.lora.use_dora=true")
    build(run_file, output_dir, *settings).run()
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
    build(run_file, tmp_path, *more).run()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # Warmup starts at 0 in the first step and reaches the peak in the second.
    assert [line["learning_rate"] for line in lines][:2] == [0, 0.01]
    assert [line["learning_rate/vision"] for line in lines][:2] == [0, pytest.approx(0.001)]
    assert lines[1]["learning_rate/*.lora_B.*"] == pytest.approx(0.02)
