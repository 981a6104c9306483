"""A policy, or a planner, with two cameras that trains on a file with one.

Losses and every gradient are those of an explicit black, masked second camera.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paddle import nn

from paddle_vl.config.load import load_run_config
from paddle_vl.nn.placement import SingleDevicePlacement
from paddle_vl.train.build import run_family
from tests.single_card_tests.train.tiny_policy_run import PLANNER, write_tiny_policy_run

ALLOW = "model.policy.empty_cameras=1"
NO_DROPS = (
    "data.drops={history_state_drop_prob: 0.0, subgoal_drop_prob: 0.0, response_drop_prob: 0.0, "
    "metadata_drop_all_prob: 0.0, metadata_drop_each_prob: 0.0}"
)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    """A run with both cameras; beside its data, files without one of them."""
    run_file = write_tiny_policy_run(tmp_path_factory.mktemp("run"), num_samples=4)
    whole = run_file.with_name("arm-joint.jsonl").read_text().splitlines()
    for name, rows in (("camera0", range(4)), ("camera1", range(4)), ("some", [0, 2])):
        lines = [json.loads(line) for line in whole]
        camera = "camera1" if name == "some" else name
        for row in rows:
            del lines[row][camera], lines[row][camera.replace("camera", "subgoal")]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        run_file.with_name(f"without_{name}.jsonl").write_text(text, encoding="utf-8")
    return run_file


class Training:
    """A model with random weights everywhere, and the whole data as one batch."""

    def __init__(self, run_file: Path, data: str, *overrides: str):
        files = f"data.train=[{run_file.with_name(data)}]"
        family = run_family(load_run_config(run_file, [files, NO_DROPS, ALLOW, *overrides]))
        built = family.build_model(SingleDevicePlacement())
        built.model.materialize_all()
        rng = np.random.default_rng(7)
        for parameter in built.model.parameters():
            # A new projector is zero, so no image would matter.
            parameter.set_value(rng.normal(0, 0.1, parameter.shape).astype(np.float32))
        self.model, self.collate = built.model, built.collator
        self.samples = [family.train_data.in_epoch(0)[number] for number in range(4)]

    def batch(self) -> dict[str, Any]:
        batch = self.collate(self.samples)
        return {name: value for name, value in batch.items() if not name.startswith("num_")}


def losses_and_gradients(
    model: nn.Layer, batch: dict[str, Any]
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    model.clear_gradients()
    losses = model(batch)
    sum(losses.values()).backward()
    gradients = {
        name: parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {name: loss.item() for name, loss in losses.items()}, gradients


def assert_same(found: Sequence[dict], wanted: Sequence[dict], exact: bool = True) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if exact:
                np.testing.assert_array_equal(ours[name], value, err_msg=name)
            else:
                scale = max(np.abs(value).max(), 1e-3)
                assert np.abs(ours[name] - value).max() <= 1e-5 * scale, name


def masked(batch: dict[str, Any], camera: int, level: float) -> dict[str, Any]:
    """The batch with one camera masked, which shows one grey level, and its goal images too."""
    batch = dict(batch)
    for images, masks in (("videos", "vid_masks"), ("subgoal_images", "subgoal_img_masks")):
        batch[images], batch[masks] = list(batch[images]), list(batch[masks])
        if not batch[images]:
            continue
        batch[images][camera] = np.full_like(batch[images][camera], level)
        batch[masks][camera] = np.zeros_like(batch[masks][camera])
    return batch


@pytest.mark.parametrize("fields", ["[response, subgoal]", "[response]"])
def test_a_missing_camera_is_a_black_masked_one(run_file, fields):
    one = Training(run_file, "without_camera1.jsonl", f"data.fields={fields}")
    batch = Training(run_file, "arm-joint.jsonl", f"data.fields={fields}").batch()
    assert bool(batch["subgoal_images"]) == ("subgoal" in fields)
    found = losses_and_gradients(one.model, one.batch())
    assert any("tower" in name and np.abs(g).max() > 0 for name, g in found[1].items())
    assert_same(found, losses_and_gradients(one.model, masked(batch, 1, 0.0)))
    assert_same(found, losses_and_gradients(one.model, masked(batch, 1, 0.7)), exact=False)
    # The second camera matters where it is there.
    assert losses_and_gradients(one.model, batch)[0] != found[0]


@pytest.mark.parametrize("camera", [0, 1])
def test_training_sees_what_acting_sees(run_file, camera):
    """Acting puts masked cameras last, so sums of floats may have another order."""
    training = Training(run_file, f"without_camera{camera}.jsonl", "data.fields=[]")
    found = training.batch()
    for sample in training.samples:
        del sample[f"camera{camera}"], sample[f"camera{camera}_is_pad"]
    acting = training.batch()
    assert [mask.all() for mask in acting["vid_masks"]] == [True, False]
    assert [mask.all() for mask in found["vid_masks"]] == [camera != 0, camera != 1]
    wanted = losses_and_gradients(training.model, acting)
    assert_same(losses_and_gradients(training.model, found), wanted, exact=camera == 1)


def test_samples_with_all_cameras_are_as_before(run_file):
    some = Training(run_file, "without_some.jsonl", "data.fields=[]").batch()
    full = Training(run_file, "arm-joint.jsonl", "data.fields=[]")
    batch = full.batch()
    assert some["vid_masks"][1].tolist() == [False, True, False, True]
    np.testing.assert_array_equal(some["videos"][1][1::2], batch["videos"][1][1::2])
    found, wanted = (full.model(x, per_sample=True) for x in (some, batch))
    for name in ("MSE_per_sample", "CE_per_sample"):
        ours, theirs = found[name][0].numpy(), wanted[name][0].numpy()
        np.testing.assert_array_equal(ours[1::2], theirs[1::2])
        assert (ours[::2] != theirs[::2]).all()


def test_the_planner_too(run_file):
    planner = [f"model.config={json.dumps(PLANNER)}", "data.fields=[past_memory, next_memory, "]
    planner[1] += "response]"
    one = Training(run_file, "without_camera1.jsonl", *planner)
    batch = Training(run_file, "arm-joint.jsonl", *planner).batch()
    explicit = dict(batch)
    explicit["images"] = [batch["images"][0], -np.ones_like(batch["images"][1])]
    explicit["img_masks"] = [batch["img_masks"][0], ~batch["img_masks"][1]]
    found = losses_and_gradients(one.model, one.batch())
    assert_same(found, losses_and_gradients(one.model, explicit))
    assert losses_and_gradients(one.model, batch)[0] != found[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.policy.empty_cameras=0"], r"lacks 1 of .* 2 cameras, .*allows 0"),
        (["model.policy.n_obs_steps=4"], "n_obs_steps 4 .* needs lines with 4 .* at most 2 in"),
        (
            ["model.policy.history_interval=3"],
            "history_interval 3 needs lines with 4 ",
        ),
    ],
)
def test_data_that_do_not_fill_an_observation_are_refused_at_once(run_file, overrides, message):
    with pytest.raises(ValueError, match=message):
        Training(run_file, "without_camera1.jsonl", *overrides)
