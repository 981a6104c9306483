"""Ranks that shard pi07's parameters and drop different optional inputs, on 2 ranks.

Guarantees, for the low-level model and the planner, at stages 2 and 3, with the tower trained and
frozen, with and without recomputation, over several micro-batches in which every rank has other
inputs and so another prefix length:

- all ranks issue the same collectives in the same order, forward and backward;
- loss terms and every parameter's gradient equal one device's that runs the same batches;
- two runs with the same seed are bit-identical, with dropout;
- the same holds for prefixes with the same layout on all ranks (`all_reduce`), whose losses differ;
- the tower runs over goals only on ranks that have one, and that changes no collective;
- the same holds for ranks that also shard matrices (mp 2, sharding 2).

Proof that the tests can fail: embedding in branches, and embedding everything without using it,
issue different collectives, and the check of collectives names them on every rank.
"""

from functools import partial

import numpy as np
import paddle
import pytest

from paddle_vl.families.pi07.prefix import Presence
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.topology import initialize
from paddle_vl.testing import first_difference
from tests.multi_card_tests.pi07_checks import (
    CAMERAS,
    EVERYTHING,
    FRAMES,
    METADATA_OF_ONE,
    NOTHING,
    ONE_GOAL,
    PLANNER,
    HoistedAndDropped,
    InBranchEmbedding,
    Setup,
    checked_run,
    compared_run,
    low_level_batch,
    low_level_model,
    model_parallel_run,
    seeded_runs,
    sharded_run,
)
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.tolerance import SYMMETRY

SAME = {
    "stage 3": Setup(),
    "stage 3 recomputed": Setup(recomputed=True),
    "stage 3 frozen recomputed": Setup(frozen=True, recomputed=True),
    "stage 2": Setup(stage=2),
    "stage 2 recomputed": Setup(stage=2, recomputed=True),
    "stage 2 frozen recomputed": Setup(stage=2, frozen=True, recomputed=True),
    "token table divided": Setup(wholly_divided=True),
    "all_reduce": Setup(agreed=True),
    "planner": Setup(family=PLANNER, drops=METADATA_OF_ONE),
    "planner stage 2 recomputed": Setup(
        stage=2, family=PLANNER, drops=METADATA_OF_ONE, recomputed=True
    ),
    "planner all_reduce": Setup(family=PLANNER, drops=METADATA_OF_ONE, agreed=True),
}
SEEDED = Setup(recomputed=True, model_settings={"dropout": 0.2})
# What diverges, and in which phase.
DIVERGING = {
    "in branches": (Setup(embedding=InBranchEmbedding), "forward"),
    "in branches stage 2": (Setup(embedding=InBranchEmbedding, stage=2), "backward"),
    "hoisted and dropped": (Setup(embedding=HoistedAndDropped), "backward"),
}
MODEL_PARALLEL = {
    "spread": (Setup(), {"sequence_parallel": True}),
    "spread recomputed frozen": (Setup(recomputed=True, frozen=True), {}),
    "replicated": (Setup(stage=2), {"vision": "replicate"}),
}
TEXT_ONLY = Setup(
    embedding=InBranchEmbedding,
    wholly_divided=True,
    drops=(({"response": (0, 1)}, NOTHING, NOTHING, NOTHING),),
)
GOALS = {
    "nowhere": ((NOTHING,) * 4,),
    "on one rank": ((ONE_GOAL, *(NOTHING,) * 3),),
    "on all": ((EVERYTHING,) * 4,),
}


def worker() -> dict:
    group = initialize(ParallelDegrees(sharding_degree=2)).sharding_group
    checks = {name: partial(compared_run, setup, group) for name, setup in SAME.items()}
    checks["seeded"] = partial(seeded_runs, SEEDED, group)
    checks |= {
        f"checked {n}": partial(checked_run, setup, group) for n, (setup, _) in DIVERGING.items()
    }
    checks["checked text"] = partial(checked_run, TEXT_ONLY, group)
    checks["checked as it is"] = partial(checked_run, Setup(), group)

    def goals(drops):
        run = sharded_run(Setup(drops=drops), group)
        return run.tower_frames, [call.kind for call in run.calls]

    checks |= {f"goals {name}": partial(goals, drops) for name, drops in GOALS.items()}
    return run_checks(checks)


def model_parallel_worker() -> dict:
    topology = initialize(ParallelDegrees(mp_degree=2, sharding_degree=2, sharding_stage=3))
    return run_checks(
        {
            name: partial(model_parallel_run, setup, topology, **placing)
            for name, (setup, placing) in MODEL_PARALLEL.items()
        }
    )


@pytest.fixture(scope="module")
def model_parallel_outcomes():
    return launch(model_parallel_worker, 4, timeout=400)


@pytest.fixture(scope="module")
def outcomes():
    return launch(worker, 2, timeout=400)


def test_every_rank_sends_the_same_collectives(outcomes):
    for name in SAME:
        calls = [run["calls"] for run in outcome_of(outcomes, name)]
        assert first_difference(calls) is None, name
        assert all(of_rank == calls[0] for of_rank in calls), name
        # Stage 2 issues no collective in forward; both stages do in backward.
        phases = {call.phase for call in calls[0]}
        expected = {"forward", "backward", "end"} if SAME[name].stage == 3 else {"backward", "end"}
        assert phases == expected, name


def test_ranks_do_have_prefixes_of_other_lengths(outcomes):
    for name in SAME:
        runs = outcome_of(outcomes, name)
        for of_ranks in zip(*[run["prefix_lengths"] for run in runs], strict=True):
            assert (len(set(of_ranks)) > 1) is not SAME[name].agreed, name


def test_losses_and_gradients_equal_one_process(outcomes):
    for name in SAME:
        runs = outcome_of(outcomes, name)
        terms = np.sum([run["terms"] for run in runs], axis=0)
        np.testing.assert_allclose(terms, runs[0]["single terms"], rtol=1e-5, err_msg=name)
        errors, sizes = runs[0]["errors"], runs[0]["sizes"]
        assert not {key: error for key, error in errors.items() if error > SYMMETRY}, name
        # The comparison covers the tower and the table, and their gradients are not zero.
        tower = [size for key, size in sizes.items() if ".tower." in key]
        assert bool(tower) is not SAME[name].frozen, name
        assert all(size > 0 for size in tower), name
        assert all(size > 0 for key, size in sizes.items() if "embed_tokens." in key), name


def test_seeded_runs_are_the_same_bit_by_bit(outcomes):
    assert outcome_of(outcomes, "seeded") == [True] * len(outcomes)


def test_what_all_ranks_lay_out_alike_gives_other_numbers(outcomes):
    hoisted = outcome_of(outcomes, "stage 3")[0]["single terms"]
    agreed = outcome_of(outcomes, "all_reduce")[0]["single terms"]
    # Far above rounding.
    assert all(abs(one - other) > 1e-5 for one, other in zip(hoisted, agreed, strict=True))


def test_a_rank_without_any_part_differs_by_its_labels_alone():
    """The labels differ as in golden cases 02 and 02e: `:\\n` against `, ` and `;\\n `."""
    model, batch = low_level_model(), low_level_batch(0, 0, NOTHING)
    with paddle.no_grad():
        alone, forced = (
            model(batch, presence)["MSE"].item() for presence in (None, Presence(True, True, True))
        )
        same_labels = model(batch, Presence(True, False, False))["MSE"].item()
    assert abs(alone - forced) > 1e-4
    # Masked blocks have no effect of their own.
    np.testing.assert_allclose(same_labels, forced, rtol=1e-5)


@pytest.mark.parametrize("name", DIVERGING)
def test_other_ways_to_embed_diverge(outcomes, name):
    messages = outcome_of(outcomes, f"checked {name}")
    phase = DIVERGING[name][1]
    for message in messages:
        assert message is not None
        assert f" in {phase}, called from " in message
        assert "rank 0 " in message or "ranks 0, " in message
        assert "the ranks are about to do different things" in message


def test_look_ups_in_branches_diverge_where_the_table_is_divided(outcomes):
    for message in outcome_of(outcomes, "checked text"):
        assert "in forward, called from pi07/" in message


def test_nothing_is_found_in_what_is_built(outcomes):
    assert outcome_of(outcomes, "checked as it is") == [None] * len(outcomes)


def test_goals_cost_frames_of_the_tower_where_they_are_and_no_collective(outcomes):
    videos, goals = CAMERAS * FRAMES * 2, CAMERAS * 2
    found = {name: outcome_of(outcomes, f"goals {name}") for name in GOALS}
    others = len(outcomes) - 1
    frames = {name: [frames for frames, _ in of_ranks] for name, of_ranks in found.items()}
    assert frames == {
        "nowhere": [[videos]] * (1 + others),
        "on one rank": [[videos + goals], *[[videos]] * others],
        "on all": [[videos + goals]] * (1 + others),
    }
    sent = [kinds for of_ranks in found.values() for _, kinds in of_ranks]
    assert all(kinds == sent[0] for kinds in sent)


@pytest.mark.heavy
@pytest.mark.parametrize("name", MODEL_PARALLEL)
def test_ranks_that_share_matrices_as_well_send_the_same(model_parallel_outcomes, name):
    runs = outcome_of(model_parallel_outcomes, name)
    calls = [run["calls"] for run in runs]
    assert first_difference(calls) is None
    # The collectives use all four groups of two ranks, and no others.
    assert {call.ranks for of_rank in calls for call in of_rank} == {(0, 1), (2, 3), (0, 2), (1, 3)}
    terms = np.sum([run["terms"] for run in runs[::2]], axis=0)
    np.testing.assert_allclose(terms, runs[0]["single terms"], rtol=1e-5)
    np.testing.assert_allclose(runs[0]["terms"], runs[1]["terms"], rtol=1e-6)
