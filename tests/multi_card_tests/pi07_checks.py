"""Checks of pi07 and its planner on every rank of a sharding group; see `test_pi07_symmetry`.

A run is one step of several micro-batches, in which every rank drops different optional inputs. The
loss of the step is the sum of squares divided by the number of valid values, plus the sum of cross
entropies divided by the number of token slots, over all micro-batches of all ranks.

All checks run under one topology, and share its model and data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.families.pi07.planner import PI07HighLevelPlannerModel
from paddle_vl.families.pi07.prefix import (
    PREFIX_BLOCKS,
    Block,
    Prefix,
    PrefixEmbedding,
    Presence,
    TokenSource,
    joined,
    look_up,
    of_cameras,
    presence_of,
)
from paddle_vl.nn.placement import Placement
from paddle_vl.parallel.collective_check import check_collectives
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.recorder import Collective, Recording, record_collectives
from paddle_vl.parallel.sharding import Sharding
from paddle_vl.parallel.tensor import FleetPlacement
from paddle_vl.parallel.topology import Topology
from tests.support.pi07_golden import drawn_batch, drawn_planner_batch, golden_model, golden_planner
from tests.support.states import gathered

CAMERAS, FRAMES = 2, 3
# Optional inputs of each micro-batch and rank: name -> samples that have it.
NOTHING: dict[str, Sequence[int]] = {}
EVERYTHING = {"response": (0, 1), "metadata": (0, 1), "subgoal": (0, 1)}
ONE_RESPONSE, ALL_METADATA, ONE_GOAL = {"response": (1,)}, {"metadata": (0, 1)}, {"subgoal": (0,)}
MIXED = {"response": (0,), "metadata": (1,), "subgoal": (1,)}
DROPS = (
    (EVERYTHING, NOTHING, ONE_RESPONSE, ONE_GOAL),
    (ALL_METADATA, ONE_GOAL, NOTHING, MIXED),
    (NOTHING, MIXED, ALL_METADATA, EVERYTHING),
)
METADATA_OF_ONE = ((ALL_METADATA, *(NOTHING,) * 3), (NOTHING, ALL_METADATA, *(NOTHING,) * 2))
SECONDS = 25.0


def low_level_model(
    frozen: bool = False, dropout: float = 0.0, placement: Placement | None = None
) -> PI07LowLevelFlowMatching:
    return golden_model(placement, freeze_vision_encoder=frozen, dropout=dropout)


def planner_model(frozen: bool = False) -> PI07HighLevelPlannerModel:
    return golden_planner(freeze_vision_encoder=frozen)


def low_level_batch(micro: int, rank: int, filled: dict[str, Sequence[int]]) -> dict[str, Any]:
    return drawn_batch(np.random.default_rng([micro, rank]), filled)


def planner_batch(micro: int, rank: int, filled: dict[str, Sequence[int]]) -> dict[str, Any]:
    return drawn_planner_batch(np.random.default_rng([micro, rank]), filled)


def low_level_losses(
    model: PI07LowLevelFlowMatching, batch: dict[str, Any], presence: Presence, batches: list
) -> list[paddle.Tensor]:
    """What a batch adds to each loss term of the full step."""
    out = model(batch, presence, per_sample=True)
    values = sum(
        int(((~b["actions_is_pad"]).sum(axis=1) * b["real_action_dim"]).sum()) for b in batches
    )
    slots = sum(b["discrete_actions"].size for b in batches)
    return [out["MSE_per_sample"][0].sum() / values, out["CE_per_sample"][0].sum() / slots]


def planner_losses(
    model: PI07HighLevelPlannerModel, batch: dict[str, Any], presence: Presence, batches: list
) -> list[paddle.Tensor]:
    # Its means are over all token slots, and every batch has the same number of them.
    return [model(batch, presence)["CE"] / len(batches)]


@dataclass(frozen=True)
class Family:
    """What differs between the low-level model and the planner."""

    make_model: Callable[..., nn.Layer]
    make_batch: Callable[[int, int, dict[str, Sequence[int]]], dict[str, Any]]
    losses: Callable[..., list[paddle.Tensor]]


LOW_LEVEL = Family(low_level_model, low_level_batch, low_level_losses)
PLANNER = Family(planner_model, planner_batch, planner_losses)


@dataclass(frozen=True)
class Setup:
    """One way to run a step.

    Attributes:
        agreed: a rank lays out the inputs that any rank has (`branch_sync: all_reduce`), not only
            its own.
        embedding: class that replaces the prefix embedding.
        wholly_divided: shard the token table as a unit too, gathered at every look-up.
    """

    stage: int = 3
    frozen: bool = False
    recomputed: bool = False
    agreed: bool = False
    family: Family = LOW_LEVEL
    drops: Sequence[Sequence[dict[str, Sequence[int]]]] = DROPS
    model_settings: dict[str, Any] = field(default_factory=dict)
    embedding: type | None = None
    wholly_divided: bool = False

    def model(self) -> nn.Layer:
        model = self.family.make_model(self.frozen, **self.model_settings)
        if self.embedding is not None:
            model.prefix.__class__ = self.embedding
        return model

    def batches(self, num_ranks: int) -> list[list[dict[str, Any]]]:
        """Batches by micro-batch and rank."""
        return [
            [self.family.make_batch(micro, rank, drops[rank]) for rank in range(num_ranks)]
            for micro, drops in enumerate(self.drops)
        ]

    def presences(self, of_ranks: Sequence[dict[str, Any]]) -> list[Presence]:
        own = [presence_of(batch) for batch in of_ranks]
        if not self.agreed:
            return own
        return [Presence(*(any(values) for values in zip(*own, strict=True)))] * len(own)


def single_run(setup: Setup, num_ranks: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Loss terms and gradients of one device that runs all batches one after the other."""
    setup = replace(setup, embedding=None, model_settings={})
    model, batches, terms = setup.model(), setup.batches(num_ranks), []
    everything = [batch for of_ranks in batches for batch in of_ranks]
    for of_ranks in batches:
        for batch, presence in zip(of_ranks, setup.presences(of_ranks), strict=True):
            losses = setup.family.losses(model, batch, presence, everything)
            sum(losses).backward()
            terms.append([loss.item() for loss in losses])
    gradients = {
        name: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy()
        for name, p in model.named_parameters()
        if not p.stop_gradient
    }
    return np.sum(terms, axis=0).tolist(), gradients


@dataclass
class ShardedRun:
    """Results of one step on this rank."""

    terms: list[float]
    gradients: dict[str, np.ndarray]
    calls: list[Collective]
    prefix_lengths: list[int]
    tower_frames: list[int]


def sharded_run(setup: Setup, group, recording: Recording | None = None) -> ShardedRun:
    """Run a step and record its collectives, here or into the given recording."""
    if recording is None:
        with record_collectives() as recording:
            return sharded_run(setup, group, recording)
    model = setup.model()
    chains = [model.decoder_layers, model.vision_blocks]
    if setup.recomputed:
        recompute_layers([layer for chain in chains for layer in chain])
    tables = model.tables if setup.wholly_divided else []
    sharding = Sharding(model.parameters(), group, setup.stage, chains, tables)
    lengths, frames = [], []
    model.prefix.register_forward_post_hook(
        lambda layer, inputs, prefix: lengths.append(prefix.embs.shape[1])
    )
    model.prefix.video_encoder.tower.register_forward_pre_hook(
        lambda layer, inputs: frames.append(inputs[0].shape[0])
    )
    batches, terms = setup.batches(group.nranks), []
    everything = [batch for of_ranks in batches for batch in of_ranks]
    for of_ranks in batches:
        presence = setup.presences(of_ranks)[group.rank]
        recording.phase = "forward"
        losses = setup.family.losses(model, of_ranks[group.rank], presence, everything)
        recording.phase = "backward"
        sum(losses).backward()
        recording.phase = "end"
        sharding.end_micro_batch()
        terms.append([loss.item() for loss in losses])
    sharding.end_backward()
    recording.phase = "gathering"
    gradients = {
        name: gathered(sharding, p, sharding.shard_of(p).grad).numpy()
        for name, p in model.named_parameters()
        if not p.stop_gradient
    }
    calls = [call for call in recording.calls if call.phase != "gathering"]
    return ShardedRun(np.sum(terms, axis=0).tolist(), gradients, calls, lengths, frames)


def compared_run(setup: Setup, group) -> dict[str, Any]:
    """A step compared with one device, which rank 0 computes: the largest error of each gradient,
    relative to its largest entry."""
    run = sharded_run(setup, group)
    found: dict[str, Any] = {"terms": run.terms, "calls": run.calls}
    found |= {"prefix_lengths": run.prefix_lengths, "tower_frames": run.tower_frames}
    if group.rank == 0:
        found["single terms"], gradients = single_run(setup, group.nranks)
        found["errors"] = {
            name: float(
                np.abs(run.gradients[name] - wanted).max() / max(np.abs(wanted).max(), 1e-6)
            )
            for name, wanted in gradients.items()
        }
        found["sizes"] = {name: float(np.abs(g).max()) for name, g in gradients.items()}
    return found


def model_parallel_run(setup: Setup, topology: Topology, **placing: Any) -> dict[str, Any]:
    """A step with tensor parallelism as well; its loss terms beside those of one device."""
    is_collective = setup.stage > 1
    placement = FleetPlacement(topology.mp_group, layers_are_collective=is_collective, **placing)
    group = topology.sharding_group
    run = sharded_run(replace(setup, model_settings={"placement": placement}), group)
    found: dict[str, Any] = {"terms": run.terms, "calls": run.calls}
    if topology.rank == 0:
        found["single terms"], _ = single_run(setup, group.nranks)
    return found


def seeded_runs(setup: Setup, group) -> bool:
    """Whether two runs with dropout are bit-identical, and a third with another seed differs."""
    runs = []
    for seed in (3, 3, 4):
        paddle.seed(100 * seed + group.rank)
        runs.append(sharded_run(setup, group))

    def equal(one: ShardedRun, two: ShardedRun) -> bool:
        return one.terms == two.terms and all(
            np.array_equal(value, two.gradients[name]) for name, value in one.gradients.items()
        )

    return equal(runs[0], runs[1]) and not equal(runs[0], runs[2])


def checked_run(setup: Setup, group) -> str | None:
    """The error that the check of collectives raises for a step; None if it passes."""
    try:
        with check_collectives(SECONDS) as recording:
            sharded_run(setup, group, recording)
    except RuntimeError as error:
        return str(error)
    return None


class InBranchEmbedding(PrefixEmbedding):
    """A rank embeds only what it lays out. Goals have their own pass of the tower, and each text
    its own look-up."""

    def forward(self, batch, presence, training=True) -> Prefix:
        blocks = [block for block in PREFIX_BLOCKS if presence.has(block, training)]
        rows = self.embed_one_by_one(batch, blocks)
        embs = joined(blocks, rows, presence, True)
        return self.tokens.masks(batch, presence)._replace(embs=embs)

    def embed_one_by_one(self, batch, blocks: list[Block]) -> dict[str, Tensor]:
        found = {}
        for block in blocks:
            if block.source in (TokenSource.FIELD, TokenSource.LABEL):
                found |= look_up(self.embed_tokens, {block.name: self.tokens.ids(block, batch)})
        for block in blocks:
            if block.source is TokenSource.VIDEOS:
                history = paddle.concat([batch["obs_history_is_pad"]] * CAMERAS)
                rows = self.video_encoder(paddle.concat(batch["videos"]), history)
                found[block.name] = of_cameras(rows, CAMERAS)
            elif block.source is TokenSource.SUBGOALS:
                rows = self.video_encoder(None, None, paddle.concat(batch["subgoal_images"]))
                found[block.name] = of_cameras(rows, CAMERAS)
            elif block.source is TokenSource.STATE:
                found[block.name] = self.embed_state(batch)
            elif block.source is TokenSource.ACTIONS:
                found[block.name] = self.embed_actions(batch)
        return found


class HoistedAndDropped(InBranchEmbedding):
    """Every rank embeds every input, and drops what it does not lay out."""

    def forward(self, batch, presence, training=True) -> Prefix:
        blocks = self.tokens.embedded(batch, presence, training)
        rows = self.embed_one_by_one(batch, blocks)
        chosen = [block for block in blocks if presence.has(block, training)]
        embs = joined(chosen, rows, presence, True)
        return self.tokens.masks(batch, presence)._replace(embs=embs)
