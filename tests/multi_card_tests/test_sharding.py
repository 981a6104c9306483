"""Parameters, gradients and optimizer state divided over 2 and over 4 real processes.

Guarantees, at stages 1, 2 and 3, on a model with units that save weights in every way, frozen
parameters in a unit and outside, sizes that no group divides, other data on every rank and a
parameter that only one rank uses: losses, gradients and every parameter of three AdamW steps of two
micro-batches equal one process's on all the data, with and without recomputation, and again bit by
bit; every rank sends the same collectives, as many as stated here; at stage 3 a unit's parameters
have no storage between steps and evaluation works; memory for gradients, parameters and moments is
what each stage promises; two forwards may come before two backwards; bfloat16 gradients are added
up in float32; shards are read, written and gathered for checkpoints; wrong use is refused.

The oracle is the same model on one process without sharding. Checks are in `sharding_checks`.
"""

import numpy as np
import pytest

from paddle_vl.parallel.sharding.memory import Elements, ModelElements, passing_bytes
from tests.launch import launch, outcome_of
from tests.multi_card_tests.sharding_checks import MICRO_BATCHES, STAGES, worker
from tests.multi_card_tests.sharding_models import NUM_BLOCKS, NUM_LAYERS, NUM_WIDE, WIDE_BYTES

TOLERANCE = 1e-5
UNITS = NUM_BLOCKS + NUM_LAYERS
# Of the memory checks, for inputs and activations.
SLACK = WIDE_BYTES // 8
GATHER, REDUCE = "all_gather", "reduce_scatter"


@pytest.fixture(scope="module", params=[2, 4], ids=["2_processes", "4_processes"])
def outcomes(request):
    return launch(worker, request.param, arguments=(request.param,))


def assert_equals_single(outcomes, trained: list[dict]) -> None:
    single = outcome_of(outcomes, "single")[0]
    losses = np.sum([of_rank.pop("losses") for of_rank in trained], axis=0)
    np.testing.assert_allclose(losses, single["losses"], rtol=TOLERANCE)
    for rank, values in enumerate(trained):
        for name, value in values.items():
            error = np.abs(value - single[name]).max() / np.abs(single[name]).max()
            assert error <= TOLERANCE, f"rank {rank}: {name} differs by {error}"


def copies(outcomes, name: str) -> list[dict]:
    return [dict(of_rank) for of_rank in outcome_of(outcomes, name)]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_losses_gradients_and_parameters_equal_one_process(outcomes, stage, recomputed):
    assert_equals_single(outcomes, copies(outcomes, f"train {stage} {recomputed}"))


@pytest.mark.parametrize("stage", STAGES)
def test_training_again_is_the_same_bit_by_bit(outcomes, stage):
    for first, again in zip(
        outcome_of(outcomes, f"train {stage} False"),
        outcome_of(outcomes, f"again {stage}"),
        strict=True,
    ):
        assert first["losses"] == again["losses"]
        for name, value in first.items():
            assert np.array_equal(value, again[name]), name


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_every_rank_sends_the_stated_collectives(outcomes, stage, recomputed):
    first, *others = outcome_of(outcomes, f"collectives {stage} {recomputed}")
    assert all(other == first for other in others)
    kinds = {
        phase: [call.kind for call in first if call.phase == phase]
        for phase in ("forward", "backward", "end", "update")
    }
    # What the root has fits in one bucket, and so does all at stage 1.
    assert (
        kinds
        == {
            1: {"forward": [], "backward": [], "end": [REDUCE], "update": [GATHER]},
            2: {
                "forward": [],
                "backward": [REDUCE] * UNITS * MICRO_BATCHES,
                "end": [REDUCE] * MICRO_BATCHES,
                "update": [GATHER] * (1 + UNITS),
            },
            3: {
                "forward": [GATHER] * UNITS * MICRO_BATCHES,
                "backward": [GATHER, REDUCE] * UNITS * MICRO_BATCHES,
                "end": [REDUCE] * MICRO_BATCHES,
                "update": [GATHER],
            },
        }[stage]
    )
    assert {call.num_ranks for call in first} == {len(outcomes)}


@pytest.mark.parametrize("stage", STAGES)
def test_a_bucket_over_its_size_is_divided(outcomes, stage):
    kinds = [seen[0] for seen in outcome_of(outcomes, f"small buckets {stage}")]
    # Embedding, rare and head; at stage 1 every unit's parameters lie between them.
    root = 3 if stage > 1 else kinds[0].count(GATHER)
    assert root >= 3
    reduced = root * (MICRO_BATCHES if stage > 1 else 1)
    gathered = root + (UNITS if stage == 2 else 0)
    assert kinds == [[REDUCE] * reduced + [GATHER] * gathered] * len(outcomes)
    assert_equals_single(
        outcomes, [dict(seen[1]) for seen in outcome_of(outcomes, f"small buckets {stage}")]
    )


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_of_units_have_no_storage_between_steps_of_stage_3(outcomes, stage):
    names = outcome_of(outcomes, "single")[0]
    in_units = {name for name in names if name.startswith(("blocks.", "layers."))}
    for without in outcome_of(outcomes, f"storage_between_steps {stage}"):
        assert set(without) == (in_units if stage == 3 else set())


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_gives_the_training_loss_without_a_graph(outcomes, stage):
    for trained, evaluated in outcome_of(outcomes, f"evaluation {stage}"):
        assert trained == evaluated


def test_memory_is_what_the_stages_promise(outcomes):
    size, whole = len(outcomes), NUM_WIDE * WIDE_BYTES
    part = whole // size
    for rank in range(size):
        seen = {stage: outcome_of(outcomes, f"memory {stage}")[rank] for stage in STAGES}
        between = {1: whole + part, 2: whole + part, 3: part}
        held = {1: whole, 2: part, 3: part}
        for stage in STAGES:
            found = seen[stage]
            assert found["moments"] == 2 * part
            assert found["between steps"] == pytest.approx(between[stage], abs=SLACK)
            assert found["after backward"] - found["between steps"] == pytest.approx(
                held[stage], abs=SLACK
            )
            assert found["after step"] == pytest.approx(between[stage] + 2 * part, abs=SLACK)
        # Of one unit at a time: gradient and what is sent of it, or gathered and given storage.
        unit = Elements(WIDE_BYTES // 4)
        model = ModelElements(Elements(whole // 4), Elements(), unit, 0, 4)
        for stage in (2, 3):
            transient = seen[stage]["peak"] - seen[stage]["after backward"]
            assert transient == pytest.approx(passing_bytes(model, stage), abs=SLACK)
        assert seen[3]["peak"] < seen[2]["peak"] - whole + WIDE_BYTES
        assert seen[2]["peak"] < seen[1]["peak"]


@pytest.mark.parametrize("stage", STAGES)
def test_own_parts_gathered_are_the_whole(outcomes, stage):
    assert outcome_of(outcomes, f"round_trip {stage}") == [[]] * len(outcomes)


@pytest.mark.parametrize("stage", STAGES)
def test_values_written_to_shards_reach_the_model(outcomes, stage):
    assert outcome_of(outcomes, f"restored {stage}") == [[]] * len(outcomes)


@pytest.mark.parametrize("stage", STAGES)
def test_two_forwards_may_come_before_two_backwards(outcomes, stage):
    assert outcome_of(outcomes, f"overlapping {stage}") == [0.0] * len(outcomes)


@pytest.mark.parametrize("stage", STAGES)
def test_what_no_rank_used_has_gradients_of_zeros(outcomes, stage):
    assert outcome_of(outcomes, f"never_used {stage}") == [[]] * len(outcomes)


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_gradients_of_micro_batches_are_added_in_float32(outcomes, stage):
    # In bfloat16 256 + 1 is 256.
    for dtype, values in outcome_of(outcomes, f"half_gradients {stage}"):
        assert (dtype, values) == ("paddle.float32", {259.0 * len(outcomes)})


def test_a_shard_has_the_marks_of_its_parameter_and_no_others(outcomes):
    for rare, head in outcome_of(outcomes, "marks"):
        assert (rare, head) == ((True, False, False), (False, True, False))


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        ("stage", "stage is 4; it must be 1, 2 or 3"),
        ("twice", "1 parameters to shard are listed twice"),
        ("two units", "of sharding unit 1 is in another unit too"),
        ("frozen", "is not divided: frozen"),
        ("shape", "[2, 3] to take a shard of does not have the shape [6, 6]"),
        ("outside", "got a gradient outside of it"),
        ("no storage", "not initialized"),
    ],
)
def test_wrong_use_is_refused(outcomes, misuse, message):
    for messages in outcome_of(outcomes, "refused"):
        assert message in messages[misuse]
