"""LoRA runs of pi07, in the forms of openpi and LeRobot and of a planner."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl.checkpoint.reading import UnreadParameters
from paddle_vl.cli.main import main
from paddle_vl.families.pi07 import policy
from paddle_vl.families.pi07.policy import PI07LowLevelPolicy
from tests.single_card_tests.train.run_kinds import policy_base
from tests.single_card_tests.train.tiny_policy_run import PLANNER, write_tiny_policy_run
from tests.single_card_tests.train.whole_runs import build
from tests.support.finished_runs import metrics_of

PREFIX = "base_model.model."
LAYERS = "model.gemma3_with_expert.interleaved_layers"
ADAPTER = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    run_file = write_tiny_policy_run(tmp_path_factory.mktemp("run"))
    return policy_base(run_file, "train.learning_rate=0.0")


def train(run_file: Path, output_dir: Path, *overrides: str) -> Path:
    assert build(run_file, output_dir, *overrides).run() is None
    return output_dir


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def trained(run_file, tmp_path_factory) -> Path:
    return train(
        run_file, tmp_path_factory.mktemp("lora") / "out", "model.lora=openpi",
        "train.save_steps=2", f"data.eval=[{run_file.with_name('arm-joint.jsonl')}]",
    )  # fmt: skip


def test_openpis_form_trains_adapters_of_both_streams_and_the_rest_in_full(trained, run_file):
    folder, base = trained / "checkpoint-4", weights(run_file.with_name("base"))
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


def test_all_that_a_run_leaves_is_the_same_policy(trained, run_file, tmp_path, capsys, monkeypatch):
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
    assert main(["merge", str(trained / "checkpoint-4"), str(merged)]) == 0
    assert len({*read}) > 100
    assert str(run_file.with_name("base")) in capsys.readouterr().out
    shutil.copytree(run_file.with_name("base"), moved)
    data = ["--data", str(run_file.with_name("arm-joint.jsonl"))]
    loss = metrics_of(trained)[-1]["eval_loss"]
    for folder, more in (("final", []), ("checkpoint-4", ["--base", str(moved)]), (merged, [])):
        assert main(["evaluate", str(trained / folder), *data, *more]) == 0
        assert f"loss: {loss:.3f}" in capsys.readouterr().out
    found, base = weights(trained / "final"), weights(moved)
    assert found.keys() == base.keys() == weights(merged).keys()
    for name, array in weights(merged).items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-6, err_msg=name)
        is_adapted = "interleaved" in name and "_proj" in name
        if is_adapted or re.search(r"interleaved|normalize|language_model|lm_head", name):
            assert (array != base[name]).any() == is_adapted, name


def test_lerobots_form_starts_from_the_base_and_changes_nothing_in_full(run_file, tmp_path):
    statistics = f"data.statistics={run_file.with_name('statistics.json')}"
    train(run_file, tmp_path, "model.lora=lerobot", statistics, "train.learning_rate=0.0")
    stored = [name.removeprefix(PREFIX) for name in load_file(tmp_path / "checkpoint-4" / ADAPTER)]
    modules = {name.split(".lora_")[0] for name in stored if "normalize" not in name}
    projections = ("state_proj", "action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out")
    assert modules == {
        *(f"{LAYERS}.{i}.expert_layer.self_attn.{n}_proj" for i in range(2) for n in "qv"),
        *(f"model.{name}" for name in projections),
    }
    # Nothing was learned, so the merged policy is the base.
    base = weights(run_file.with_name("base"))
    for name, array in weights(tmp_path / "final").items():
        np.testing.assert_array_equal(array, base[name], err_msg=name)
    policy = PI07LowLevelPolicy.from_pretrained(tmp_path / "checkpoint-4")
    mean = policy.normalizers["unnormalize_outputs"].tensors["buffer_actions.mean"]
    np.testing.assert_array_equal(mean, base["unnormalize_outputs.buffer_actions.mean"])


def test_a_planner_is_adapted_too(run_file, tmp_path):
    planner = ["model.pretrained=null", f"model.config={json.dumps(PLANNER)}"]
    train(run_file, tmp_path / "base", *planner, "train.max_steps=1", "train.learning_rate=0.0")
    base = tmp_path / "base" / "final"
    lora = "{r: 2, use_dora: true, target_modules: [all-linear], exclude_modules: [vision]}"
    settings = [f"model.lora={lora}", f"model.pretrained={base}", "train.max_steps=2"]
    train(run_file, tmp_path / "out", *settings)
    found, before = weights(tmp_path / "out" / "final"), weights(base)
    changed = {name for name, array in found.items() if (array != before[name]).any()}
    assert changed == {name for name in found if "backbone_layer" in name and "_proj" in name}
