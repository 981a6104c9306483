"""pi07 and its planner under tensor and sequence parallelism, against one device.

Guarantees, on 2 and 4 ranks (4 ranks share 2 key heads, and some have no video):

- losses, every gradient and sampled actions equal one device's within 1e-5 of the tensor's largest
  entry: with and without sequence parallelism over a row count that the ranks do not divide; with
  the tower's work sharded or replicated, frozen or not; with and without knowledge insulation and
  recomputation; with different optional inputs;
- fresh weights and saved files equal one device's;
- each video and goal is encoded once; a frozen tower costs one collective and no gradient;
- all ranks issue the same collectives in the same order;
- dropout masks agree on ranks with the same rows, and differ on ranks with their own.

One launch per world size runs all of it.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import Tensor

from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.checkpoint.writing import parameter_array
from paddle_vl.families.pi07.policy import PI07LowLevelPolicy
from paddle_vl.parallel.collectives import all_reduce_partial_gradients
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.random_state import seed_split_random
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.recorder import Collective, record_collectives
from paddle_vl.parallel.tensor import FleetPlacement
from paddle_vl.parallel.topology import initialize
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.pi07_golden import (
    CharacterTokenizer,
    FirstValueActionTokenizer,
    drawn_batch,
    drawn_planner_batch,
    golden_model,
    golden_planner,
    group_statistics,
)
from tests.support.tolerance import TOPOLOGY

# Three samples of 5 steps: neither 2 nor 4 divides the number of rows.
SAMPLES, STEPS = 3, 5
PARTS = ("response", "metadata", "subgoal")


@dataclass(frozen=True)
class Setup:
    """A model and its batch.

    Attributes:
        parts: optional inputs, which every other sample has.
        num_samples: 1 also means one camera.
        layers_are_collective: every rank runs every layer, as under stage 3.
    """

    sequence_parallel: bool = True
    vision: str = "spread"
    parts: tuple[str, ...] = PARTS
    insulated: bool = True
    frozen: bool = False
    recomputed: bool = False
    num_samples: int = SAMPLES
    is_planner: bool = False
    layers_are_collective: bool = False


ALL = [(sp, vision) for sp in (False, True) for vision in ("spread", "replicate")]
TWO = [(True, "spread"), (False, "replicate")]
SETUPS = {
    f"{kind} sp={sp} {vision}": Setup(sp, vision, **settings)
    for kind, (layouts, settings) in {
        "everything": (ALL, {}),
        "nothing": (TWO, {"parts": ()}),
        "not insulated": (TWO, {"insulated": False, "parts": ("response",)}),
        "frozen": (ALL, {"frozen": True, "parts": ("subgoal",)}),
        "planner": (TWO, {"is_planner": True, "parts": ("metadata",)}),
    }.items()
    for sp, vision in layouts
} | {
    "planner without metadata": Setup(is_planner=True, parts=()),
    "recomputed": Setup(recomputed=True),
    "recomputed, rows whole": Setup(sequence_parallel=False, recomputed=True, insulated=False),
    "one video": Setup(num_samples=1, parts=("metadata",)),
    "one video and a goal": Setup(num_samples=1, parts=("subgoal",)),
    "one video, frozen": Setup(num_samples=1, parts=(), frozen=True),
    "one video on all": Setup(num_samples=1, parts=(), layers_are_collective=True),
}


def make_model(setup: Setup, placement=None):
    """A model with the weights of golden case 01."""
    if setup.is_planner:
        model = golden_planner(placement)
    else:
        model = golden_model(placement, **policy_settings(setup))
    if setup.recomputed:
        recompute_layers([*model.vision_blocks, *model.decoder_layers])
    model.train()
    return model


def policy_settings(setup: Setup) -> dict[str, Any]:
    return {
        "knowledge_insulation": setup.insulated,
        "freeze_vision_encoder": setup.frozen,
        "chunk_size": STEPS,
        "n_action_steps": STEPS,
    }


def make_batch(setup: Setup) -> dict[str, Any]:
    rng, size = np.random.default_rng(3), setup.num_samples
    has = dict.fromkeys(setup.parts, tuple(range(0, size, 2)))
    shape = {"samples": size, "cameras": 1 if size == 1 else 2}
    if setup.is_planner:
        return drawn_planner_batch(rng, has, **shape)
    return drawn_batch(rng, has, steps=STEPS, **shape)


class Step(NamedTuple):
    """A rank's step against one device's.

    Attributes:
        error, where: the largest relative error of losses and gradients, and its tensor.
        collectives: all collectives by phase, in order.
        frames: frames of every call of the tower.
    """

    error: float
    where: str
    collectives: dict[str, list[Collective]]
    frames: list[int]


def losses_of(model, batch: dict[str, Any]) -> tuple[list[float], Tensor]:
    losses = model(batch)
    return [losses["MSE"].item(), losses["CE"].item()], losses["MSE"] + losses["CE"]


def step_of(group, setup: Setup) -> Step:
    whole, batch = make_model(setup), make_batch(setup)
    wanted, loss = losses_of(whole, batch)
    loss.backward()
    placement = FleetPlacement(
        group,
        setup.sequence_parallel,
        setup.vision,
        layers_are_collective=setup.layers_are_collective,
    )
    model = make_model(setup, placement)
    frames: list[int] = []
    tower = model.prefix.video_encoder.tower
    tower.register_forward_pre_hook(lambda _, given: frames.append(given[0].shape[0]))
    with record_collectives() as recording:
        recording.phase = "forward"
        found, loss = losses_of(model, batch)
        recording.phase = "backward"
        loss.backward()
        recording.phase = "gradients"
        table = model.placement.parameter_table
        all_reduce_partial_gradients(table.with_specs(model.parameters()), group)
    collectives = {phase: recording.of(phase) for phase in ("forward", "backward", "gradients")}
    worst = max((abs(f - w) / max(w, 1e-30), "loss") for f, w in zip(found, wanted, strict=True))
    worst = max(worst, *gradient_differences(model, whole))
    return Step(*worst, collectives, frames)


def gradient_differences(model, whole) -> Iterator[tuple[float, str]]:
    """Error of every gradient, relative to its largest entry, and the gradient's key."""
    wanted = {
        item.key: None if (grad := item.parameter.grad) is None else item.of_own(grad.numpy())
        for item in whole.stored_parameters()
    }
    for item in model.stored_parameters():
        grad, expected = item.parameter.grad, wanted[item.key]
        assert (grad is None) == (expected is None), item.key
        if grad is None:
            continue
        expected = item.from_stored(item.layout.to_stored(expected))
        error = np.abs(item.of_own(grad.numpy()) - expected)
        # Softmax ignores a constant on all keys, so the key bias has a gradient of rounding only.
        yardstick = wanted[item.key.replace("k_proj.bias", "q_proj.bias")]
        yield float(error.max() / max(np.abs(yardstick).max(), 1e-30)), item.key


def sampled_actions(group, sequence_parallel: bool) -> float:
    """Largest relative error against one device."""
    setup = Setup(sequence_parallel)
    batch, found = make_batch(setup), []
    placement = FleetPlacement(group, sequence_parallel)
    for model in (make_model(setup), make_model(setup, placement)):
        model.eval()
        found.append(model.sample_actions(batch, batch["noise"], num_steps=2).numpy())
    return float(np.abs(found[0] - found[1]).max() / np.abs(found[0]).max())


class Tokenizer(CharacterTokenizer):
    def save_pretrained(self, folder: Path) -> None:
        """Nothing to save."""


class ActionTokenizer(FirstValueActionTokenizer):
    def save_pretrained(self, folder: Path) -> None:
        """Nothing to save."""


def fresh_weights_and_files(folder: str, group) -> list[str]:
    """Names of tensors that differ from one device's after a rank draws, all save or each loads."""
    config = golden_model(**policy_settings(Setup())).config.changed(
        per_group_projection=True, dataset_names=["a", "b"]
    )
    parts = (Tokenizer(), ActionTokenizer(), group_statistics())
    placement = FleetPlacement(group, sequence_parallel=True)
    paddle.seed(7)
    whole = PI07LowLevelPolicy.from_config(config, *parts)
    paddle.seed(7)
    policy = PI07LowLevelPolicy.from_config(config, *parts, placement=placement)
    assert policy.model.whole_shapes() == whole.model.whole_shapes()
    policy.save_pretrained(f"{folder}/parts")
    whole.save_pretrained(f"{folder}/whole{group.rank}")
    dist.barrier()
    again = PI07LowLevelPolicy.from_pretrained(
        f"{folder}/parts", tokenizer=parts[0], action_tokenizer=parts[1], placement=placement
    )
    stored = [read_checkpoint_headers(Path(folder) / n) for n in ("parts", f"whole{group.rank}")]
    assert list(stored[0]) == list(stored[1])
    wrong = [n for n, t in stored[0].items() if (t.read() != stored[1][n].read()).any()]
    wanted = {item.key: parameter_array(item) for item in whole.model.stored_parameters()}
    for model in (policy.model, again.model):
        for item in model.stored_parameters():
            if (parameter_array(item) != wanted[item.key]).any():
                wrong.append(item.key)
    return wrong


def dropped_rows(group, sequence_parallel: bool) -> list[float]:
    """The output of dropout on ones."""
    placement = FleetPlacement(group, sequence_parallel)
    paddle.seed(1)
    seed_split_random([1], group.rank)
    return placement.layers.row_dropout(0.5)(paddle.ones([8, 8])).numpy().ravel().tolist()


def worker(folder: str, num_ranks: int) -> dict:
    group = initialize(ParallelDegrees(mp_degree=num_ranks)).mp_group
    checks = {name: partial(step_of, group, setup) for name, setup in SETUPS.items()}
    checks["files"] = partial(fresh_weights_and_files, folder, group)
    for sp in (False, True):
        checks[f"sampled {sp}"] = partial(sampled_actions, group, sp)
        checks[f"dropout {sp}"] = partial(dropped_rows, group, sp)
    return run_checks(checks)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.heavy)])
def outcomes(request):
    with tempfile.TemporaryDirectory() as folder:
        yield launch(worker, request.param, arguments=(folder, request.param), timeout=300)


@pytest.mark.parametrize("name", SETUPS)
def test_losses_and_every_gradient_equal_one_device(outcomes, name):
    for rank, step in enumerate(outcome_of(outcomes, name)):
        assert step.error <= TOPOLOGY, f"rank {rank}: {step.where}"


@pytest.mark.parametrize("sp", [False, True])
def test_sampled_actions_equal_one_device(outcomes, sp):
    assert max(outcome_of(outcomes, f"sampled {sp}")) <= TOPOLOGY


def test_fresh_weights_and_saved_files_are_those_of_one_device(outcomes):
    assert outcome_of(outcomes, "files") == [[]] * len(outcomes)


@pytest.mark.parametrize("name", SETUPS)
def test_every_rank_sends_the_same_collectives_in_the_same_order(outcomes, name):
    first, *others = (step.collectives for step in outcome_of(outcomes, name))
    assert len(first["forward"]) > 10
    assert all(other == first for other in others)


def test_every_video_and_goal_is_encoded_once_where_the_tower_is_spread(outcomes):
    def frames(name: str) -> list[int]:
        calls = [step.frames for step in outcome_of(outcomes, name)]
        assert all(len(of_rank) <= 1 for of_rank in calls)
        return [sum(of_rank) for of_rank in calls]

    # Two cameras, three samples, three frames and a goal; goals that no sample has are left out.
    assert sum(frames("everything sp=True spread")) == 24
    assert sum(frames("nothing sp=True spread")) == 18
    assert max(frames("everything sp=True spread")) <= -(-24 // len(outcomes)) + 2
    assert frames("everything sp=True replicate") == [24] * len(outcomes)
    assert sum(frames("one video")) == 3
    # A rank without a video encodes one blank frame.
    assert frames("one video on all") == [3] + [1] * (len(outcomes) - 1)


@pytest.mark.parametrize("sp", [False, True])
def test_a_frozen_tower_costs_one_collective_and_no_gradient(outcomes, sp):
    spread, replicated = (
        outcome_of(outcomes, f"frozen sp={sp} {vision}")[0].collectives
        for vision in ("spread", "replicate")
    )
    gathers = [
        [call.kind for call in calls["forward"]].count("all_gather")
        for calls in (spread, replicated)
    ]
    assert gathers[0] == gathers[1] + 1
    assert len(spread["forward"]) == len(replicated["forward"]) + 1
    assert spread["backward"] == replicated["backward"]
    assert spread["gradients"] == replicated["gradients"]


def test_dropout_is_that_of_the_rows_that_a_rank_has(outcomes):
    first, *others = outcome_of(outcomes, "dropout False")
    assert set(first) == {0.0, 2.0}
    assert all(other == first for other in others)
    own = outcome_of(outcomes, "dropout True")
    assert len({tuple(rows) for rows in own}) == len(own)
