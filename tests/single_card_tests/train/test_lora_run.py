"""LoRA runs: what they save, the commands that take their folders, and pi07's forms."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.checkpoint.reading import UnreadParameters
from paddle_vl.cli.main import main
from paddle_vl.families.pi07 import policy
from paddle_vl.families.pi07.policy import PI07LowLevelPolicy
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from tests.single_card_tests.train.run_kinds import policy_base, write_lora_run
from tests.single_card_tests.train.tiny_policy_run import PLANNER, write_tiny_policy_run
from tests.single_card_tests.train.whole_runs import build
from tests.support.finished_runs import metrics_of

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


def test_evaluate_and_merge_take_the_run(trained, run_file, tmp_path, capsys):
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


PREFIX = "base_model.model."
LAYERS = "model.gemma3_with_expert.interleaved_layers"
ADAPTER = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory) -> Path:
    policy_file = write_tiny_policy_run(tmp_path_factory.mktemp("run"))
    return policy_base(policy_file, "train.learning_rate=0.0")


def train(policy_file: Path, output_dir: Path, *overrides: str) -> Path:
    assert build(policy_file, output_dir, *overrides).run() is None
    return output_dir


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def policy_trained(policy_file, tmp_path_factory) -> Path:
    return train(
        policy_file, tmp_path_factory.mktemp("lora") / "out", "model.lora=openpi",
        "train.save_steps=2", f"data.eval=[{policy_file.with_name('arm-joint.jsonl')}]",
    )  # fmt: skip


def test_openpis_form_trains_adapters_of_both_streams_and_the_rest_in_full(
    policy_trained, policy_file
):
    folder, base = policy_trained / "checkpoint-4", weights(policy_file.with_name("base"))
    stored = {n.removeprefix(PREFIX): a for n, a in load_file(folder / ADAPTER).items()}
    ranks = {n: a.shape[0] for n, a in stored.items() if n.endswith("lora_A.weight")}
    linears = [*(f"self_attn.{n}_proj" for n in "qkvo"), *(f"mlp.{n}_proj" for n in ("gate", "up"))]
    assert ranks == {
        f"{LAYERS}.{i}.{stream}_layer.{linear}.lora_A.weight": rank
        for i in range(2)
        for stream, rank in (("backbone", 16), ("expert", 32))
        for linear in (*linears, "mlp.down_proj")
    }
    in_full = {n for n in stored if ".lora_" not in n and "normalize" not in n}
    frozen = ("interleaved", "normalize", "language_model", "lm_head", "gemma_expert.")
    assert in_full == {n for n in base if not any(part in n for part in frozen)}
    values = json.loads((folder / "adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"], values["task_type"]) == (16, 16, None)
    of_expert = {name.removesuffix(".lora_A.weight"): 32 for name in ranks if "expert_" in name}
    assert values["rank_pattern"] == values["alpha_pattern"]
    assert values["rank_pattern"].items() >= of_expert.items()
    state = {n.rpartition("/")[0] for n in load_file(folder / "optimizer.safetensors")}
    assert state == {n for n in stored if "normalize" not in n}


def test_all_that_a_run_leaves_is_the_same_policy(
    policy_trained, policy_file, tmp_path, capsys, monkeypatch
):
    """Checkpoint with its base, final/, and what merge makes of the checkpoint."""

    class Watched(UnreadParameters):
        def __init__(self, model):
            super().__init__(model)
            self.model, read[:] = model, []

        def gathered_value(self, parameter):
            value = super().gathered_value(parameter)
            assert not any(one._is_initialized() for one in self.model.parameters())
            read.append(id(parameter))
            return value

    read: list[int] = []
    monkeypatch.setattr(policy, "UnreadParameters", Watched)
    merged, moved = tmp_path / "merged", tmp_path / "base"
    assert main(["merge", str(policy_trained / "checkpoint-4"), str(merged)]) == 0
    assert len({*read}) > 100
    assert str(policy_file.with_name("base")) in capsys.readouterr().out
    shutil.copytree(policy_file.with_name("base"), moved)
    data = ["--data", str(policy_file.with_name("arm-joint.jsonl"))]
    loss = metrics_of(policy_trained)[-1]["eval_loss"]
    for folder, more in (("final", []), ("checkpoint-4", ["--base", str(moved)]), (merged, [])):
        assert main(["evaluate", str(policy_trained / folder), *data, *more]) == 0
        assert f"loss: {loss:.3f}" in capsys.readouterr().out
    found, base = weights(policy_trained / "final"), weights(moved)
    assert found.keys() == base.keys() == weights(merged).keys()
    for name, array in weights(merged).items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-6, err_msg=name)
        is_adapted = "interleaved" in name and "_proj" in name
        if is_adapted or re.search(r"interleaved|normalize|language_model|lm_head", name):
            assert (array != base[name]).any() == is_adapted, name


def test_lerobots_form_starts_from_the_base_and_changes_nothing_in_full(policy_file, tmp_path):
    statistics = f"data.statistics={policy_file.with_name('statistics.json')}"
    train(policy_file, tmp_path, "model.lora=lerobot", statistics, "train.learning_rate=0.0")
    stored = [name.removeprefix(PREFIX) for name in load_file(tmp_path / "checkpoint-4" / ADAPTER)]
    modules = {name.split(".lora_")[0] for name in stored if "normalize" not in name}
    projections = ("state_proj", "action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out")
    assert modules == {
        *(f"{LAYERS}.{i}.expert_layer.self_attn.{n}_proj" for i in range(2) for n in "qv"),
        *(f"model.{name}" for name in projections),
    }
    # Nothing was learned, so the merged policy is the base.
    base = weights(policy_file.with_name("base"))
    for name, array in weights(tmp_path / "final").items():
        np.testing.assert_array_equal(array, base[name], err_msg=name)
    policy = PI07LowLevelPolicy.from_pretrained(tmp_path / "checkpoint-4")
    mean = policy.normalizers["unnormalize_outputs"].tensors["buffer_actions.mean"]
    np.testing.assert_array_equal(mean, base["unnormalize_outputs.buffer_actions.mean"])


def test_a_planner_is_adapted_too(policy_file, tmp_path):
    planner = ["model.pretrained=null", f"model.config={json.dumps(PLANNER)}"]
    train(policy_file, tmp_path / "base", *planner, "train.max_steps=1", "train.learning_rate=0.0")
    base = tmp_path / "base" / "final"
    lora = "{r: 2, use_dora: true, target_modules: [all-linear], exclude_modules: [vision]}"
    settings = [f"model.lora={lora}", f"model.pretrained={base}", "train.max_steps=2"]
    train(policy_file, tmp_path / "out", *settings)
    found, before = weights(tmp_path / "out" / "final"), weights(base)
    changed = {name for name, array in found.items() if (array != before[name]).any()}
    assert changed == {name for name in found if "backbone_layer" in name and "_proj" in name}
