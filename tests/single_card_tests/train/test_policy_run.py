"""A pi07 policy and a planner in the trainer, from demonstrations and from LeRobot datasets."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl.config.families import family_of_folder
from paddle_vl.config.load import load_run_config, save_run_config
from paddle_vl.data.lerobot.metadata import read_metadata
from paddle_vl.data.lerobot.statistics import statistics
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.families.base import EvaluationOptions
from paddle_vl.families.pi07.planner import PI07HighLevelPlanner
from paddle_vl.families.pi07.policy import PI07LowLevelPolicy
from paddle_vl.families.pi07.recipe import PI07Recipe
from paddle_vl.train.build import build_trainer
from paddle_vl.train.evaluate import mean_losses
from paddle_vl.train.step import ModelRunner
from tests.single_card_tests.families.pi07.demonstration_builders import same
from tests.single_card_tests.train.batches import count_calls
from tests.single_card_tests.train.run_kinds import (
    FEATURES,
    LANGUAGE,
    policy_base,
    with_mixture,
    write_robot_run,
)
from tests.single_card_tests.train.tiny_policy_run import (
    MODEL,
    PLANNER,
    SHAPES,
    write_tiny_policy_run,
)
from tests.single_card_tests.train.whole_runs import build
from tests.support.finished_runs import arrays_of, metrics_of

NO_DROPS = (
    "data.drops={history_state_drop_prob: 0.0, subgoal_drop_prob: 0.0, response_drop_prob: 0.0, "
    "metadata_drop_all_prob: 0.0, metadata_drop_each_prob: 0.0}"
)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_tiny_policy_run(tmp_path_factory.mktemp("run"))


def trained(run_file, folder, *overrides) -> Path:
    assert build(run_file, folder, *overrides).run() is None
    return folder


def test_training_lowers_both_losses_and_the_policy_acts(run_file, tmp_path):
    settings = ["train.max_steps=24", "train.save_steps=null", "train.learning_rate=0.02"]
    evaluation = [f"data.eval=[{run_file.parent / 'arm-joint.jsonl'}]", "train.eval_steps=8"]
    found = metrics_of(trained(run_file, tmp_path / "out", *settings, *evaluation))
    # The first evaluation follows eight steps.
    for prefix, share in (("", 0.8), ("eval_", 0.95)):
        for name in (f"{prefix}loss", f"{prefix}MSE", f"{prefix}CE"):
            values = [line[name] for line in found if name in line]
            assert values[-1] < share * values[0], name
    assert found[0]["loss"] == pytest.approx(found[0]["MSE"] + found[0]["CE"])
    assert "target_tokens" not in found[0]
    assert found[0]["samples_per_second"] > 0
    data = [str(run_file.parent / "arm-joint.jsonl")]
    for batch_size in (8, 3):
        options = EvaluationOptions(data, batch_size)
        folder = tmp_path / "out" / "final"
        evaluation = family_of_folder(folder).ask("evaluate", folder, options)
        runner = ModelRunner(evaluation.model, evaluation.loss, evaluation.adapter)
        losses = mean_losses(runner, evaluation.loader)
        assert losses.loss == pytest.approx(found[-1]["eval_loss"], rel=1e-4)
    assert "MSE: " in "\n".join(evaluation.report(losses))
    policy = PI07LowLevelPolicy.from_pretrained(tmp_path / "out" / "final")
    size = SHAPES["image_size"]
    observation = {
        "state": np.zeros((1, SHAPES["state_dim"]), np.float32),
        "camera0": np.full((1, 3, *size), 0.5, np.float32),
        "camera1": np.full((1, 3, *size), 0.5, np.float32),
        "prompt": ["reach the mark"],
    }
    action = policy.select_action(observation)
    assert action.shape == (1, SHAPES["action_dim"])
    assert np.isfinite(action).all()


def test_a_steps_losses_are_the_models_own_on_the_whole_batch(run_file, tmp_path):
    """Two micro-batches of two against one of four; without drops, so all have the same layout."""
    whole = ["train.per_device_train_batch_size=4", "train.gradient_accumulation_steps=1", NO_DROPS]
    overrides = [f"train.output_dir={tmp_path / 'one'}", *whole]
    trainer = build_trainer(load_run_config(run_file, overrides))
    batch = next(trainer.data)
    wanted = trainer.runner.model({k: v for k, v in batch.items() if not k.startswith("num_")})
    trainer.data.close()
    one = metrics_of(trained(run_file, tmp_path / "one", *whole))
    two = metrics_of(trained(run_file, tmp_path / "two", NO_DROPS))
    for name in ("MSE", "CE"):
        assert one[0][name] == pytest.approx(wanted[name].item(), rel=1e-5)
        for ours, theirs in zip(two, one, strict=True):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)


def test_the_planner_learns_what_it_is_to_write(run_file, tmp_path):
    settings = [f"model.config={json.dumps(PLANNER)}", "train.learning_rate=0.02"]
    settings += ["train.max_steps=12", "train.save_steps=null"]
    settings += [f"data.eval=[{run_file.parent / 'arm-joint.jsonl'}]"]
    whole = trained(run_file, tmp_path / "whole", *settings)
    found = metrics_of(whole)
    for name in ("CE_memory", "CE_response"):
        assert found[-1][name] < 0.8 * found[0][name]
    assert found[-1]["eval_CE_memory"] < found[0]["CE_memory"]
    plan = PI07HighLevelPlanner.from_pretrained(whole / "final").plan(
        {
            "state": np.zeros((1, SHAPES["state_dim"]), np.float32),
            "camera0": np.full((1, 3, 28, 28), 0.5, np.float32),
            "camera1": np.full((1, 3, 28, 28), 0.5, np.float32),
            "prompt": ["reach the mark"],
            "past_memory": [""],
        }
    )
    assert len(plan.memory) == len(plan.response) == 1


@pytest.mark.parametrize("name", ["past_memory", "next_memory", "response"])
def test_a_planner_refuses_demonstrations_without_its_texts(run_file, tmp_path, name):
    file, planner = run_file.parent / f"no_{name}.jsonl", json.dumps(PLANNER)
    rows = map(json.loads, (run_file.parent / "arm-joint.jsonl").read_text().splitlines())
    lines = [json.dumps({**row, name: None}) for row in rows]
    file.write_text("\n".join(["", *lines]))
    said = rf"no_{name}\.jsonl:2: the demonstration has no '{name}', nor has any other.*add them"
    settings = [f"train.output_dir={tmp_path}", f"model.config={planner}", f"data.train=[{file}]"]
    with pytest.raises(ValueError, match=said):
        build_trainer(load_run_config(run_file, settings))
    (tmp_path / "config.json").write_text(planner)
    with pytest.raises(ValueError, match=said):
        family_of_folder(tmp_path).ask("evaluate", tmp_path, EvaluationOptions([str(file)], 2))


@pytest.mark.parametrize("insulated", [True, False])
@pytest.mark.parametrize("loss", ["MSE", "CE"])
def test_a_loss_of_weight_zero_leaves_what_only_it_trains_alone(
    run_file, tmp_path, loss, insulated
):
    """The trained parameters are exactly those with a gradient from the other loss."""
    config = json.dumps(MODEL | {"knowledge_insulation": insulated})
    overrides = [
        f"train.output_dir={tmp_path}",
        f"train.loss_weighting={{{loss}: 0.0}}",
        f"model.config={config}",
    ]
    trainer = build_trainer(load_run_config(run_file, overrides))
    model = trainer.runner.model
    trained_here = {
        name for name, parameter in model.named_parameters() if not parameter.stop_gradient
    }
    for parameter in model.parameters():
        parameter.stop_gradient = False
    batch = {k: v for k, v in next(trainer.data).items() if not k.startswith("num_")}
    trainer.data.close()
    other = "CE" if loss == "MSE" else "MSE"
    model(batch)[other].backward()
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained_here == reached


UNFREEZE = "model.policy.freeze_vision_encoder=false"
TOWER = "model.gemma3_with_expert.gemma3.model.vision_tower."


@pytest.fixture(scope="module")
def frozen(tmp_path_factory) -> Path:
    """Settings that start from a policy that was trained with a frozen tower, so its projector is
    not zero any more."""
    run_file = write_tiny_policy_run(tmp_path_factory.mktemp("run"), freeze_vision_encoder=True)
    return policy_base(run_file, "train.max_steps=4")


def moved(before: Path, after: Path) -> set[str]:
    old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
    return {name for name, value in new.items() if not np.array_equal(value, old[name])}


def test_one_setting_unfreezes_a_checkpoint_and_is_saved(frozen, tmp_path):
    base, out = frozen.with_name("base"), trained(frozen, tmp_path / "open", UNFREEZE)
    tower = {n for n in load_file(base / "model.safetensors") if n.startswith(TOWER)}
    assert len(tower) > 30
    # Softmax ignores a bias that all keys share.
    assert tower - moved(base, out / "final") <= {n for n in tower if "k_proj.bias" in n}
    moments = arrays_of(out / "checkpoint-4")
    for name in tower:
        assert np.abs(moments[f"{name}/moment2"]).max() > 0, name
    for folder in (out / "final", out / "checkpoint-4"):
        saved = json.loads((folder / "config.json").read_text())
        assert not saved["freeze_vision_encoder"]
        assert not saved["vlm_config"]["freeze_vision_encoder"]
    config = load_run_config(out / "config.yaml")
    assert config.model.policy.given == {"freeze_vision_encoder": False}
    # Without the setting the checkpoint's tower stays; a part of it may.
    assert not moved(base, trained(frozen, tmp_path / "kept") / "final") & tower
    first = f"model.freeze=[{TOWER}vision_model.encoder.layers.0.*]"
    part = moved(base, trained(frozen, tmp_path / "part", UNFREEZE, first) / "final")
    assert not any(".encoder.layers.0." in name for name in part)
    assert any(f"{TOWER}vision_model.encoder.layers.1." in name for name in part)


def test_gradient_checkpointing_of_the_run_recomputes(frozen, tmp_path):
    counts = []
    for value in ("false", "true"):
        override = f"model.policy.gradient_checkpointing={value}"
        trainer = build(frozen, tmp_path / value, override, "train.max_steps=1")
        calls = count_calls(trainer.runner.model.decoder_layers[0].backbone_layer.mlp)
        trainer.run()
        counts.append(len(calls))
    assert counts[1] == 2 * counts[0]


@pytest.fixture(scope="module")
def robot_file(tmp_path_factory) -> Path:
    return write_robot_run(tmp_path_factory.mktemp("run"))


def test_a_dataset_is_trained_on_and_evaluated(robot_file, tmp_path):
    mapping = "{camera0: observation.images.wrist, camera1: observation.images.front}"
    overrides = [f"data.train=[{LANGUAGE}]", f"data.data_features_name_mapping={mapping}"]
    overrides += ["train.max_steps=24", "train.learning_rate=0.02", "train.save_steps=null"]
    found = metrics_of(trained(robot_file, tmp_path / "out", *overrides))
    for name in ("MSE", "CE"):
        values = [line[name] for line in found]
        assert np.mean(values[-8:]) < 0.9 * np.mean(values[:4]), name
    policy = PI07LowLevelPolicy.from_pretrained(tmp_path / "out" / "final")
    wanted = statistics(read_metadata(LANGUAGE))["action"]["mean"]
    stored = policy.normalizers["normalize_targets"].tensors["buffer_actions.mean"]
    np.testing.assert_array_equal(stored, wanted.astype(np.float32)[None])
    folder = tmp_path / "out" / "final"
    evaluation = family_of_folder(folder).ask("evaluate", folder, EvaluationOptions([LANGUAGE], 8))
    runner = ModelRunner(evaluation.model, evaluation.loss, evaluation.adapter)
    assert np.isfinite(mean_losses(runner, evaluation.loader).loss)


def test_the_planner_learns_from_language_columns(robot_file, tmp_path):
    planner = json.dumps(PLANNER | {"input_features": FEATURES})
    overrides = [f"data.train=[{LANGUAGE}]", f"model.config={planner}", "train.max_steps=1"]
    (found,) = metrics_of(trained(robot_file, tmp_path / "out", *overrides))
    assert min(found["CE_memory"], found["CE_response"]) > 0.1


def test_ranks_draw_the_samples_of_one_device(robot_file, tmp_path):
    config = load_run_config(robot_file, [f"train.output_dir={tmp_path}", *with_mixture()])
    recipe = PI07Recipe(config, None)
    settings = {"shuffle": True, "drop_last": True, "seed": 5}
    one = PrefetchLoader(recipe.train_data, list, 4, **settings)
    ranks = [
        PrefetchLoader(recipe.train_data, list, 2, rank=rank, size=2, **settings) for rank in (0, 1)
    ]
    next(one)
    ranks[0].load_state_dict(one.state_dict())
    ranks[1].load_state_dict(one.state_dict())
    batch, parts = next(one), [next(rank) for rank in ranks]
    assert all(same(batch[2 * i + r], parts[r][i]) for i in (0, 1) for r in (0, 1))


@pytest.mark.parametrize("key", ["0", '"0"', "'0'", "!!int 0"])
def test_dims_are_mapped_by_whole_numbers_with_or_without_quotes(key, robot_file, tmp_path):
    one = f"[{{root: a, use_delta_joint_actions: true, delta_action_state_map: {{{key}: 3}}}}]"
    config = load_run_config(
        robot_file, ["data.train=[]", f"data.dataset_mixture={{datasets: {one}}}"]
    )
    assert config.data.dataset_mixture.datasets[0].delta_action_state_map == {0: 3}
    save_run_config(config, file := tmp_path / "run.yaml")
    assert load_run_config(file) == config
