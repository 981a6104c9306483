"""LoRA runs of pi07.

Guarantees: the forms of openpi and LeRobot adapt and train what these do, with their ranks and
scalings; nothing else changes; checkpoints hold PEFT's files under OpenTau's names, with statistics
and configuration, and final/ the merged policy, which `merge` makes of a checkpoint too; all have
the same evaluation loss; a resumed run is bit-identical; what contradicts itself is refused.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl.cli.main import main
from paddle_vl.config.load import load_run_config
from paddle_vl.families.pi07.policy import PI07LowLevelPolicy
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.support.finished_runs import metrics_of

PREFIX = "base_model.model.model."
LAYER = "gemma3_with_expert.interleaved_layers.0"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    """Settings of a run beside a base policy."""
    path = write_tiny_policy_run(tmp_path_factory.mktemp("run"))
    train(path, path.with_name("of_base"), "train.max_steps=1", "train.learning_rate=0.0")
    shutil.move(path.with_name("of_base") / "final", path.with_name("base"))
    return path


def train(run_file: Path, output_dir: Path, *overrides: str) -> Path:
    config = load_run_config(run_file, [f"train.output_dir={output_dir}", *overrides])
    assert build_trainer(config).run() is None
    return output_dir


def adapted(run_file: Path, lora: str, *more: str) -> list[str]:
    base = f"model.pretrained={run_file.with_name('base')}"
    return ["model.config=null", base, f"model.lora={lora}", *more]


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def trained(run_file, tmp_path_factory) -> Path:
    data = f"data.eval=[{run_file.with_name('arm-joint.jsonl')}]"
    more = ["train.save_steps=2", "model.policy.dropout=0.1", "train.recompute=full", data]
    return train(
        run_file, tmp_path_factory.mktemp("lora") / "out", *adapted(run_file, "openpi", *more)
    )


def test_openpis_form_trains_adapters_of_both_streams_and_the_rest_in_full(trained, run_file):
    folder = trained / "checkpoint-4"
    stored = load_file(folder / "adapter_model.safetensors")
    base, names = weights(run_file.with_name("base")), {*stored}
    shapes = {name.removeprefix(PREFIX): array.shape for name, array in stored.items()}
    for stream, rank in (("backbone", 16), ("expert", 32)):
        for linear in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
            assert shapes[f"{LAYER}.{stream}_layer.{linear}.lora_A.weight"][0] == rank
    low_rank = {name for name in names if ".lora_" in name}
    in_full = {name.removeprefix("base_model.model.") for name in names - low_rank}
    assert len(low_rank) == 2 * 2 * 7 * 2
    parts = ("vision_tower.", "projector.", "da_head.", "discrete_action_e", "_proj.", "time_mlp_")
    wanted = {
        name for name in base if any(f"model.{p}" in name or p in name for p in parts)
        and "interleaved" not in name and "normalize" not in name
    }  # fmt: skip
    statistics = {name for name in in_full if "normalize" in name}
    assert in_full - statistics == wanted
    values = json.loads((folder / "adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"], values["task_type"]) == (16, 16, None)
    expert = f"model.{LAYER}.expert_layer.self_attn.q_proj"
    assert values["rank_pattern"][expert] == values["alpha_pattern"][expert] == 32
    assert len(values["rank_pattern"]) == 14
    state = load_file(folder / "optimizer.safetensors")
    assert {f"base_model.model.{name.rpartition('/')[0]}" for name in state} == {
        name for name in names if "normalize" not in name
    }


def test_all_that_a_run_leaves_is_the_same_policy(trained, run_file, tmp_path, capsys):
    """Checkpoint with its base, final/, and what merge makes of the checkpoint."""
    merged = tmp_path / "merged"
    assert main(["merge", str(trained / "checkpoint-4"), str(merged)]) == 0
    assert str(run_file.with_name("base")) in capsys.readouterr().out
    moved = tmp_path / "base"
    shutil.copytree(run_file.with_name("base"), moved)
    data = ["--data", str(run_file.with_name("arm-joint.jsonl"))]
    for folder, more in (("final", []), ("checkpoint-4", ["--base", str(moved)]), (merged, [])):
        assert main(["evaluate", str(trained / folder), *data, *more]) == 0
        loss = metrics_of(trained)[-1]["eval_loss"]
        assert f"loss: {loss:.3f}" in capsys.readouterr().out
    found, base = weights(trained / "final"), weights(run_file.with_name("base"))
    assert found.keys() == base.keys() == weights(merged).keys()
    changed = {name for name in found if not np.array_equal(found[name], base[name])}
    assert f"model.{LAYER}.expert_layer.mlp.up_proj.weight" in changed
    untouched = {name for name in found.keys() - changed if "normalize" not in name}
    assert all(
        "norm" in name or "language_model" in name or "lm_head" in name for name in untouched
    )
    for name, array in weights(merged).items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-6, err_msg=name)


def test_a_resumed_run_is_bit_identical(trained, run_file, tmp_path):
    shutil.copytree(trained / "checkpoint-2", tmp_path / "checkpoint-2")
    data = f"data.eval=[{run_file.with_name('arm-joint.jsonl')}]"
    more = ["train.save_steps=2", "model.policy.dropout=0.1", "train.recompute=full", data]
    more += ["train.resume_from_checkpoint=auto"]
    train(run_file, tmp_path, *adapted(run_file, "openpi", *more))
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        expected, found = (load_file(f / "checkpoint-4" / name) for f in (trained, tmp_path))
        assert found.keys() == expected.keys()
        for key, array in expected.items():
            np.testing.assert_array_equal(found[key], array, err_msg=key)


def test_lerobots_form_starts_from_the_base_and_changes_nothing_in_full(run_file, tmp_path):
    statistics = f"data.statistics={run_file.with_name('statistics.json')}"
    settings = adapted(run_file, "lerobot", statistics, "train.learning_rate=0.0")
    stored = load_file(
        train(run_file, tmp_path, *settings) / "checkpoint-4" / "adapter_model.safetensors"
    )
    modules = {name.removeprefix(PREFIX).split(".lora_")[0] for name in stored if ".lora_" in name}
    ends = {module.removeprefix("gemma3_with_expert.interleaved_layers.") for module in modules}
    attention = {f"{i}.expert_layer.self_attn.{n}_proj" for i in range(2) for n in "qv"}
    projections = {"state_proj", "action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out"}
    assert ends == attention | projections
    assert all(".lora_" in name or "normalize" in name for name in stored)
    # Nothing was learned, so the merged policy is the base.
    base = weights(run_file.with_name("base"))
    for name, array in weights(tmp_path / "final").items():
        np.testing.assert_array_equal(array, base[name], err_msg=name)
    policy = PI07LowLevelPolicy.from_pretrained(tmp_path / "checkpoint-4")
    key = "buffer_actions.mean"
    statistic = policy.normalizers["unnormalize_outputs"].tensors[key]
    np.testing.assert_array_equal(statistic, base[f"unnormalize_outputs.{key}"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.policy.freeze_vision_encoder=true"], r"freezes, such as .*set model\.policy"),
        (["model.lora=openpy"], "there are openpi and lerobot"),
        (["model.lora={target_modules: [expert], rank_pattern: {expertt: 2}}"], "'expertt' fits"),
        (
            ["model.pretrained=null", "model.config={type: pi07_low_level}"],
            "model.pretrained is not",
        ),
        (["train.ema={decay: 0.9}"], r"set train\.ema=null"),
    ],
)
def test_settings_that_cannot_be_are_refused(run_file, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        train(run_file, tmp_path, *adapted(run_file, "openpi", *settings))
