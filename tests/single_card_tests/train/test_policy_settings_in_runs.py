"""Runs with `model.policy` over a checkpoint whose tower is frozen.

Guarantees: one setting trains the tower, with gradients other than zero; the saved policy and
settings have the change, and a resumed run is bit-identical; another value on resuming is refused;
recomputation and dropout are those of the settings; settings that undo each other are refused.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl.config.load import load_run_config
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.batches import count_calls
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.support.finished_runs import arrays_of, lasting, metrics_of

UNFREEZE = "model.policy.freeze_vision_encoder=false"
TOWER = "model.gemma3_with_expert.gemma3.model.vision_tower."


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_tiny_policy_run(tmp_path_factory.mktemp("run"), freeze_vision_encoder=True)


@pytest.fixture(scope="module")
def frozen(run_file) -> Path:
    """A checkpoint that was trained with a frozen tower, so its projector is not zero any more."""
    assert build_trainer(load_run_config(run_file)).run() is None
    return run_file.parent / "out" / "final"


def trainer_of(run_file: Path, frozen: Path, folder: Path, *overrides: str):
    given = [f"model={{pretrained: {frozen}}}", f"train.output_dir={folder}", *overrides]
    return build_trainer(load_run_config(run_file, given))


def trained(run_file: Path, frozen: Path, folder: Path, *overrides: str) -> Path:
    assert trainer_of(run_file, frozen, folder, *overrides).run() is None
    return folder


def moved(before: Path, after: Path) -> set[str]:
    old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
    return {name for name, value in new.items() if not np.array_equal(value, old[name])}


def tower_of(folder: Path) -> set[str]:
    return {name for name in load_file(folder / "model.safetensors") if name.startswith(TOWER)}


def test_one_setting_unfreezes_a_checkpoint_and_is_saved(run_file, frozen, tmp_path):
    out = trained(run_file, frozen, tmp_path / "open", UNFREEZE)
    tower = tower_of(frozen)
    assert len(tower) > 30
    # Softmax ignores a bias that all keys share.
    assert tower - moved(frozen, out / "final") <= {n for n in tower if "k_proj.bias" in n}
    moments = arrays_of(out / "checkpoint-4")
    for name in tower:
        assert np.abs(moments[f"{name}/moment2"]).max() > 0, name
    for folder in (out / "final", out / "checkpoint-4"):
        saved = json.loads((folder / "config.json").read_text())
        assert (
            saved["freeze_vision_encoder"] is saved["vlm_config"]["freeze_vision_encoder"] is False
        )
    config = load_run_config(out / "config.yaml")
    assert config.model.policy.given == {"freeze_vision_encoder": False}
    # Without the setting the checkpoint's tower stays.
    assert not moved(frozen, trained(run_file, frozen, tmp_path / "kept") / "final") & tower


def test_a_resumed_run_keeps_the_policy_bit_for_bit(run_file, frozen, tmp_path):
    settings = [UNFREEZE, "model.policy.dropout=0.2", "train.save_steps=2"]
    whole = trained(run_file, frozen, tmp_path / "whole", *settings)
    resume = ["train.resume_from_checkpoint=auto"]
    again = tmp_path / "again"
    shutil.copytree(whole / "checkpoint-2", again / "checkpoint-2")
    trained(run_file, frozen, again, *settings, *resume)
    assert not moved(whole / "final", again / "final")
    assert lasting(metrics_of(again)) == lasting(metrics_of(whole))[2:]
    assert json.loads((again / "final" / "config.json").read_text())["dropout"] == 0.2
    refused = tmp_path / "refused"
    shutil.copytree(whole / "checkpoint-2", refused / "checkpoint-2")
    for other in (settings[1:], [*settings, "model.policy.freeze_vision_encoder=true"]):
        with pytest.raises(
            ValueError, match=r"policy\.freeze_vision_encoder: False -> (None|True)"
        ):
            trainer_of(run_file, frozen, refused, *other, *resume)


def test_gradient_checkpointing_of_the_run_recomputes(run_file, frozen, tmp_path):
    counts = []
    for value in ("false", "true"):
        override = f"model.policy.gradient_checkpointing={value}"
        trainer = trainer_of(run_file, frozen, tmp_path / value, override, "train.max_steps=1")
        calls = count_calls(trainer.runner.model.decoder_layers[0].backbone_layer.mlp)
        trainer.run()
        counts.append(len(calls))
    assert counts[1] == 2 * counts[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [UNFREEZE, "model.freeze=[vision]"],
            r"since model\.freeze \['vision'\] freezes all",
        ),
        ([UNFREEZE, "train.loss_weighting={CE: 0.0}"], r"loss_weighting .* leaves out its loss"),
        (
            [UNFREEZE, "model.policy.train_state_action_representation_only=true"],
            "since train_state_action_representation_only is true",
        ),
        (["model.policy.max_action_dim=8"], r"max_action_dim is 8, but .*/final, .* has 6"),
    ],
)
def test_settings_that_undo_each_other_or_the_weights_are_refused(
    run_file, frozen, tmp_path, overrides, message
):
    with pytest.raises(ValueError, match=message):
        trainer_of(run_file, frozen, tmp_path, *overrides)


def test_part_of_the_tower_may_stay_frozen(run_file, frozen, tmp_path):
    first = f"model.freeze=[{TOWER}vision_model.encoder.layers.0.*]"
    out = trained(run_file, frozen, tmp_path / "out", UNFREEZE, first, "train.max_steps=2")
    changed = moved(frozen, out / "final")
    assert not any(".encoder.layers.0." in name for name in changed)
    assert any(f"{TOWER}vision_model.encoder.layers.1." in name for name in changed)
