"""Ranks that shard pi07's parameters and drop different optional inputs, on 2 ranks.

A run is one step of several micro-batches. Its loss is the sum of squares divided by the number of
valid values, plus the sum of cross entropies divided by the number of token slots, over all
micro-batches of all ranks.

Guarantees, for the low-level model and the planner, at stages 2 and 3, with the tower trained and
frozen, with and without recomputation, over several micro-batches in which every rank has other
inputs and so another prefix length:

- all ranks issue the same collectives in the same order, forward and backward;
- loss terms and every parameter's gradient equal one device's that runs the same batches;
- the same holds for prefixes with the same layout on all ranks (`all_reduce`), whose losses differ;
- the tower runs over goals only on ranks that have one, and that changes no collective.

`one_device` has runs with the same seed, and of ranks that also shard matrices.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest

from paddle_vl.families.pi07.prefix import Presence, presence_of
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.recorder import record_collectives
from paddle_vl.parallel.topology import Topology, initialize
from paddle_vl.testing import first_difference
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.pi07_golden import drawn_batch, drawn_planner_batch, golden_model, golden_planner
from tests.support.sharding_models import Mode, Run
from tests.support.tolerance import SYMMETRY

RANKS, CAMERAS, FRAMES = 2, 2, 3
# Optional inputs of each micro-batch and rank: name -> samples that have it.
Inputs = Mapping[str, Sequence[int]]
NOTHING: Inputs = {}
EVERYTHING = {"response": (0, 1), "metadata": (0, 1), "subgoal": (0, 1)}
ALL_METADATA, ONE_GOAL = {"metadata": (0, 1)}, {"subgoal": (0,)}
DROPS = ((EVERYTHING, NOTHING), (ALL_METADATA, ONE_GOAL), (
    NOTHING, {"response": (0,), "metadata": (1,), "subgoal": (1,)},
))  # fmt: skip
GOALS = {
    "nowhere": ((NOTHING, NOTHING),),
    "on one rank": ((ONE_GOAL, NOTHING),),
    "on all": ((EVERYTHING, EVERYTHING),),
}


class Setup(NamedTuple):
    """One way to run a step.

    Attributes:
        agreed: a rank lays out the inputs that any rank has (`branch_sync: all_reduce`), not only
            its own.
    """

    stage: int = 3
    frozen: bool = False
    recomputed: bool = False
    agreed: bool = False
    is_planner: bool = False
    drops: Sequence[Sequence[Inputs]] = DROPS

    def model(self) -> Any:
        make = golden_planner if self.is_planner else partial(golden_model, dropout=0.0)
        return make(freeze_vision_encoder=self.frozen)

    def batches(self) -> list[list[dict[str, Any]]]:
        """Batches by micro-batch and rank."""
        draw = drawn_planner_batch if self.is_planner else drawn_batch
        return [
            [draw(np.random.default_rng([micro, rank]), drops[rank]) for rank in range(RANKS)]
            for micro, drops in enumerate(self.drops)
        ]

    def presences(self, of_ranks: Sequence[dict[str, Any]]) -> list[Presence]:
        own = [presence_of(batch) for batch in of_ranks]
        if not self.agreed:
            return own
        return [Presence(*(any(values) for values in zip(*own, strict=True)))] * len(own)

    def losses(self, model: Any, rank: int, micro: int) -> list[paddle.Tensor]:
        """What a batch adds to each loss term of the full step."""
        batches = self.batches()
        batch, presence = batches[micro][rank], self.presences(batches[micro])[rank]
        every = [each for of_ranks in batches for each in of_ranks]
        if self.is_planner:
            # Means are over all token slots, of which every batch has the same number.
            return [model(batch, presence)["CE"] / len(every)]
        out = model(batch, presence, per_sample=True)
        values = sum(
            int(((~b["actions_is_pad"]).sum(axis=1) * b["real_action_dim"]).sum()) for b in every
        )
        slots = sum(b["discrete_actions"].size for b in every)
        return [out["MSE_per_sample"][0].sum() / values, out["CE_per_sample"][0].sum() / slots]


METADATA_OF_ONE = ((ALL_METADATA, NOTHING), (NOTHING, ALL_METADATA))
PLANNER = Setup(is_planner=True, drops=METADATA_OF_ONE)
SAME = {
    "stage 3": Setup(),
    "stage 3 recomputed": Setup(recomputed=True),
    "stage 3 frozen recomputed": Setup(frozen=True, recomputed=True),
    "stage 2": Setup(stage=2),
    "stage 2 recomputed": Setup(stage=2, recomputed=True),
    "stage 2 frozen recomputed": Setup(stage=2, frozen=True, recomputed=True),
    "all_reduce": Setup(agreed=True),
    "planner": PLANNER,
    "planner stage 2 recomputed": PLANNER._replace(stage=2, recomputed=True),
    "planner all_reduce": PLANNER._replace(agreed=True),
}


def sharded(setup: Setup, topology: Topology) -> dict[str, Any]:
    """Terms, gradients and collectives of a step, prefix lengths, and frames of the tower."""
    model = setup.model()
    chains = [model.decoder_layers, model.vision_blocks]
    if setup.recomputed:
        recompute_layers([layer for chain in chains for layer in chain])
    run = Run(model, topology, Mode(setup.stage), chains)
    lengths, frames, terms = [], [], []
    model.prefix.register_forward_post_hook(
        lambda layer, inputs, prefix: lengths.append(prefix.embs.shape[1])
    )
    model.prefix.video_encoder.tower.register_forward_pre_hook(
        lambda layer, inputs: frames.append(inputs[0].shape[0])
    )
    with record_collectives() as recording:
        for micro in range(len(setup.drops)):
            recording.phase = "forward"
            losses = setup.losses(model, topology.rank, micro)
            recording.phase = "backward"
            sum(losses).backward()
            recording.phase = "end"
            run.trained.end_micro_batch()
            terms.append([loss.item() for loss in losses])
        run.trained.end_backward()
    found = {"calls": recording.calls, "lengths": lengths, "frames": frames}
    return found | {"terms": np.sum(terms, axis=0), "gradients": run.gradients()}


def compared(setup: Setup, topology: Topology) -> dict[str, Any]:
    """A step beside one device that runs all batches one after the other, on rank 0: errors of
    gradients relative to their largest entry, and these."""
    found = sharded(setup, topology)
    gradients = found.pop("gradients")
    if topology.rank == 0:
        model, terms = setup.model(), []
        for micro in range(len(setup.drops)):
            for rank in range(RANKS):
                losses = setup.losses(model, rank, micro)
                sum(losses).backward()
                terms.append([loss.item() for loss in losses])
        found["single terms"] = np.sum(terms, axis=0)
        found["sizes"], found["errors"] = {}, {}
        for name, parameter in model.named_parameters():
            if not parameter.stop_gradient:
                grad = paddle.zeros_like(parameter) if parameter.grad is None else parameter.grad
                size = float(np.abs(grad.numpy()).max())
                error = np.abs(gradients[f"gradient of {name}"] - grad.numpy()).max()
                found["sizes"][name], found["errors"][name] = size, error / max(size, 1e-6)
    return found


def worker() -> dict:
    topology = initialize(ParallelDegrees(sharding_degree=RANKS))
    checks = {name: partial(compared, setup, topology) for name, setup in SAME.items()}
    for name, drops in GOALS.items():
        checks[f"goals {name}"] = partial(sharded, Setup(drops=drops), topology)
    return run_checks(checks)


@pytest.fixture(scope="module")
def outcomes():
    return launch(worker, RANKS, timeout=400)


@pytest.mark.parametrize("name", SAME)
def test_ranks_send_the_same_and_give_what_one_device_does(outcomes, name):
    runs, setup = outcome_of(outcomes, name), SAME[name]
    calls = [run["calls"] for run in runs]
    assert first_difference(calls) is None
    assert all(of_rank == calls[0] for of_rank in calls)
    # Stage 2 issues no collective in forward; both stages do in backward.
    phases = {"forward", "backward", "end"} if setup.stage == 3 else {"backward", "end"}
    assert {call.phase for call in calls[0]} == phases
    for of_ranks in zip(*[run["lengths"] for run in runs], strict=True):
        assert (len(set(of_ranks)) > 1) is not setup.agreed
    terms = np.sum([run["terms"] for run in runs], axis=0)
    np.testing.assert_allclose(terms, runs[0]["single terms"], rtol=1e-5)
    errors, sizes = runs[0]["errors"], runs[0]["sizes"]
    assert not {key: error for key, error in errors.items() if error > SYMMETRY}
    # The comparison covers the tower and the table, and their gradients are not zero.
    tower = [size for key, size in sizes.items() if ".tower." in key]
    assert bool(tower) is not setup.frozen
    assert all(size > 0 for size in tower)
    assert all(size > 0 for key, size in sizes.items() if "embed_tokens." in key)


def test_what_all_ranks_lay_out_alike_gives_other_numbers(outcomes):
    hoisted, agreed = (
        outcome_of(outcomes, name)[0]["single terms"] for name in ("stage 3", "all_reduce")
    )
    # Far above rounding.
    assert (np.abs(hoisted - agreed) > 1e-5).all()


def test_a_rank_without_any_part_differs_by_its_labels_alone():
    """The labels differ as in golden cases 02 and 02e: `:\\n` against `, ` and `;\\n `."""
    model, ((batch, _),) = Setup().model(), Setup(drops=GOALS["nowhere"]).batches()
    with paddle.no_grad():
        alone, forced = (
            model(batch, presence)["MSE"].item() for presence in (None, Presence(True, True, True))
        )
        same_labels = model(batch, Presence(True, False, False))["MSE"].item()
    assert abs(alone - forced) > 1e-4
    # Masked blocks have no effect of their own.
    np.testing.assert_allclose(same_labels, forced, rtol=1e-5)


def test_goals_cost_frames_of_the_tower_where_they_are_and_no_collective(outcomes):
    videos, goals = CAMERAS * FRAMES * 2, CAMERAS * 2
    found = {name: outcome_of(outcomes, f"goals {name}") for name in GOALS}
    assert {name: [run["frames"] for run in runs] for name, runs in found.items()} == {
        "nowhere": [[videos]] * RANKS,
        "on one rank": [[videos + goals], [videos]],
        "on all": [[videos + goals]] * RANKS,
    }
    sent = [[call.kind for call in run["calls"]] for runs in found.values() for run in runs]
    assert all(kinds == sent[0] for kinds in sent)
