"""Sharding stages 2 and 3 on 2 ranks against one device.

The model has units that save weights in every way, frozen parameters inside and outside of units,
sizes that no group size divides, and a parameter that only one rank uses. Each rank has its own
data. Guarantees, with every option:

- losses, gradients and every parameter after three AdamW steps of two micro-batches equal one
  device's, with and without recomputation and with a tied head; a second run is bit-identical;
- every rank issues the same collectives, in the stated number; the next unit is prefetched before a
  unit computes; a reduction is awaited after the next unit's backward pass;
- at stage 3, parameters of units and tables have no storage between steps, and evaluation works;
- memory of gradients, parameters and moments is that of the stage, and at most two units are
  unsharded at a time;
- two forward passes may precede two backward passes; units that do not run are not gathered, and
  their gradients are reduced as zeros;
- bfloat16 gradients are accumulated in float32, and `reduce_dtype` halves the reduced bytes;
- shards are read, written and gathered for checkpoints; wrong use is refused.

The checks are in `sharding_checks`.
"""

import numpy as np
import pytest

from tests.multi_card_tests.sharding_checks import HALVES, MICRO_BATCHES, MODES, RANKS, worker
from tests.support.launch import launch, outcome_of
from tests.support.sharding_memory import Elements, ModelElements, at_peak, passing_bytes
from tests.support.sharding_models import NUM_BLOCKS, NUM_LAYERS, NUM_WIDE, WIDE_BYTES
from tests.support.tolerance import TOPOLOGY

UNITS = NUM_BLOCKS + NUM_LAYERS
PASSES = ("forward", "backward")
TABLES = ("embedding.", "head.")
# For inputs and activations in the memory checks.
SLACK = WIDE_BYTES // 8
GATHER, REDUCE = "all_gather", "reduce_scatter"


@pytest.fixture(scope="module")
def outcomes():
    return launch(worker, RANKS)


def assert_equals_single(outcomes, trained: list[dict]) -> None:
    single = outcome_of(outcomes, "single")[0]
    losses = np.sum([of_rank.pop("losses") for of_rank in trained], axis=0)
    np.testing.assert_allclose(losses, single["losses"], rtol=TOPOLOGY)
    for rank, values in enumerate(trained):
        for name, value in values.items():
            error = np.abs(value - single[name]).max() / np.abs(single[name]).max()
            assert error <= TOPOLOGY, f"rank {rank}: {name} differs by {error}"


def copies(outcomes, name: str) -> list[dict]:
    return [dict(of_rank) for of_rank in outcome_of(outcomes, name)]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_losses_gradients_and_parameters_equal_one_process(outcomes, mode, recomputed):
    assert_equals_single(outcomes, copies(outcomes, f"train {mode} {recomputed}"))


@pytest.mark.parametrize("mode", MODES)
def test_training_again_is_the_same_bit_by_bit(outcomes, mode):
    for first, again in zip(
        outcome_of(outcomes, f"train {mode} False"),
        outcome_of(outcomes, f"again {mode}"),
        strict=True,
    ):
        assert first["losses"] == again["losses"]
        for name, value in first.items():
            assert np.array_equal(value, again[name]), name


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_every_rank_sends_the_stated_collectives(outcomes, mode, recomputed):
    first, *others = outcome_of(outcomes, f"collectives {mode} {recomputed}")
    assert all(other == first for other in others)
    kinds = {
        phase: [call.kind for call in first if call.phase == phase]
        for phase in ("forward", "backward", "end", "update")
    }
    # The root's gradients fit in one bucket.
    units, times = [REDUCE] * UNITS, MICRO_BATCHES
    # At stage 2, tables are not units.
    whole = [GATHER] * (UNITS + len(TABLES))
    behind = [REDUCE] * 2
    # The head's gradient is reduced at once. Then each chain gathers its last unit; every other
    # unit is gathered before the unit behind it computes.
    chains = [NUM_LAYERS, NUM_BLOCKS]
    ahead = [kind for n in chains for kind in [GATHER, *[GATHER, REDUCE] * (n - 1), REDUCE]]
    assert (
        kinds
        == {
            "2": {
                "forward": [],
                "backward": units * times,
                "end": [REDUCE] * times,
                "update": [GATHER] * (1 + UNITS),
            },
            "2 once": {
                "forward": [],
                "backward": units,
                "end": [REDUCE],
                "update": [GATHER] * (1 + UNITS),
            },
            "3": {
                "forward": whole * times,
                "backward": [REDUCE, *ahead] * times,
                "end": behind * times,
                "update": [GATHER],
            },
            "3 kept": {
                "forward": whole,
                "backward": [REDUCE, *units] * times,
                "end": behind * times,
                "update": [GATHER],
            },
        }[mode]
    )
    assert {call.num_ranks for call in first} == {len(outcomes)}


def passes(name: str, *first: str) -> list[str]:
    """Events of a unit's computation, after the events right before it."""
    return [*first, f"begin {name}", f"end {name}"]


SENT, CAME = "wait for reduce_scatter", "wait for all_gather"
FORWARD_OF_3 = [
    *passes("block 0", GATHER, CAME, GATHER),
    *passes("block 1", CAME),
    *[GATHER, CAME],
    *passes("layer 0", GATHER, CAME, GATHER),
    *passes("layer 1", CAME, GATHER),
    *passes("layer 2", CAME),
    *[GATHER, CAME, "loss"],
]
ENDS_OF_3 = [SENT, REDUCE, SENT, REDUCE, SENT]


def test_next_gather_is_sent_before_a_unit_computes_and_reductions_run_behind_the_next(outcomes):
    """In a backward pass, the computation is the recomputation before the unit's own backward."""
    backward = [
        REDUCE,
        *passes("layer 2", GATHER, CAME, GATHER),
        *passes("layer 1", SENT, REDUCE, CAME, GATHER),
        *passes("layer 0", SENT, REDUCE, CAME),
        *passes("block 1", SENT, REDUCE, GATHER, CAME, GATHER),
        *passes("block 0", SENT, REDUCE, CAME),
        *[SENT, REDUCE],
    ]
    for events in outcome_of(outcomes, "order 3"):
        assert events == FORWARD_OF_3 + backward + ENDS_OF_3


def test_what_is_kept_is_not_gathered_again(outcomes):
    backward = [REDUCE, *passes("layer 2")]
    for name in ("layer 1", "layer 0", "block 1", "block 0"):
        backward += passes(name, SENT, REDUCE)
    for events in outcome_of(outcomes, "order 3 kept"):
        assert events == FORWARD_OF_3 + backward + [SENT, REDUCE] + ENDS_OF_3


@pytest.mark.parametrize("mode", ["2", "2 once", "3", "3 kept"])
def test_one_reduction_at_most_is_on_its_way(outcomes, mode):
    for events in outcome_of(outcomes, f"order {mode}"):
        running = np.cumsum([(e == REDUCE) - (e == SENT) for e in events])
        assert set(running) == {0, 1}
        assert running[-1] == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_head_may_be_the_token_table(outcomes, mode):
    for errors in outcome_of(outcomes, f"tied {mode}"):
        assert max(errors.values()) <= TOPOLOGY, errors


@pytest.mark.parametrize("mode", MODES)
def test_units_that_do_not_run_in_a_micro_batch_are_not_gathered_for_it(outcomes, mode):
    tables = len(TABLES)
    sent = {
        "2": (0, NUM_LAYERS + 1),
        # The blocks' gradients of the first micro-batch are included.
        "2 once": (0, UNITS + 1),
        "3": (2 * NUM_LAYERS + tables, NUM_LAYERS + tables + 1),
        "3 kept": (0, NUM_LAYERS + tables + 1),
    }[mode]
    for error, kinds in outcome_of(outcomes, f"text_last {mode}"):
        assert error <= TOPOLOGY
        assert (kinds.count(GATHER), kinds.count(REDUCE)) == sent


@pytest.mark.parametrize("mode", HALVES)
def test_bfloat16_reductions_send_half_the_bytes(outcomes, mode):
    whole = outcome_of(outcomes, f"half_bytes {mode.removesuffix(' bfloat16')}")
    for halves, of_rank in zip(outcome_of(outcomes, f"half_bytes {mode}"), whole, strict=True):
        assert {dtype for dtype, _ in halves} == {"bfloat16"}
        assert {dtype for dtype, _ in of_rank} == {"float32"}
        assert [2 * size for _, size in halves] == [size for _, size in of_rank]


@pytest.mark.parametrize("mode", MODES)
def test_a_bucket_over_its_size_is_divided(outcomes, mode):
    kinds = [seen[0] for seen in outcome_of(outcomes, f"small buckets {mode}")]
    # Embedding, rare and head; at stage 3 only rare.
    stage = MODES[mode].stage
    root = {2: 3, 3: 1}[stage]
    # At stage 3 the embedding's gradient is reduced then too.
    times = 1 if mode == "2 once" else MICRO_BATCHES
    reduced = (root + (stage == 3)) * times
    gathered = root + (UNITS if stage == 2 else 0)
    assert kinds == [[REDUCE] * reduced + [GATHER] * gathered] * len(outcomes)
    assert_equals_single(
        outcomes, [dict(seen[1]) for seen in outcome_of(outcomes, f"small buckets {mode}")]
    )


@pytest.mark.parametrize("mode", MODES)
def test_parameters_of_units_and_tables_have_no_storage_between_steps_of_stage_3(outcomes, mode):
    names = outcome_of(outcomes, "single")[0]
    divided = {name for name in names if name.startswith(("blocks.", "layers.", *TABLES))}
    for without in outcome_of(outcomes, f"storage_between_steps {mode}"):
        assert set(without) == (divided if MODES[mode].stage == 3 else set())


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_gives_the_training_loss_without_a_graph(outcomes, mode):
    for trained, evaluated in outcome_of(outcomes, f"evaluation {mode}"):
        assert trained == evaluated


def test_memory_is_what_the_stages_promise(outcomes):
    size, whole = len(outcomes), NUM_WIDE * WIDE_BYTES
    part = whole // size
    unit = Elements(WIDE_BYTES // 4)
    model = ModelElements(Elements(whole // 4), Elements(), unit, 0, 4)
    for rank in range(len(outcomes)):
        peaks = {}
        for name, (stage, options) in MODES.items():
            found = outcome_of(outcomes, f"memory {name}")[rank]
            between = part if stage == 3 else whole + part
            assert found["moments"] == 2 * part
            for moment in ("between steps", "evaluation"):
                assert found[moment] == pytest.approx(between, abs=SLACK)
            # Gradients are either full, or sharded plus one unit's that is being reduced.
            is_once = options.reduce_once_per_step
            first = found["first backward"] - found["first forward"]
            assert first == pytest.approx(whole if is_once else part + WIDE_BYTES, abs=SLACK)
            assert found["end of backward"] == pytest.approx(between + part, abs=SLACK)
            assert found["after step"] == pytest.approx(between + 2 * part, abs=SLACK)
            held = at_peak(model, stage, size, 2, options)
            most = held.total - held.moments + passing_bytes(model, stage, options)
            passes = [f"{n} {kind}, peak" for n in ("first", "last") for kind in PASSES]
            peaks[name] = max(found[moment] for moment in passes)
            # The peak adds the shard that this rank receives from the running reduction.
            assert most - WIDE_BYTES <= peaks[name] <= most + WIDE_BYTES // size + SLACK, name
        # Two units are unsharded at a time; the third is gloo's copy of what it gathers.
        evaluation = outcome_of(outcomes, "memory 3")[rank]["evaluation, peak"]
        assert evaluation == pytest.approx(part + 3 * WIDE_BYTES, abs=SLACK)
        assert peaks["3"] < peaks["3 kept"] < peaks["2 once"]
        assert peaks["2"] < peaks["2 once"]


@pytest.mark.parametrize("mode", MODES)
def test_own_parts_gathered_are_the_whole(outcomes, mode):
    assert outcome_of(outcomes, f"round_trip {mode}") == [[]] * len(outcomes)


@pytest.mark.parametrize("mode", MODES)
def test_values_written_to_shards_reach_the_model(outcomes, mode):
    assert outcome_of(outcomes, f"restored {mode}") == [[]] * len(outcomes)


@pytest.mark.parametrize("mode", MODES)
def test_two_forwards_may_come_before_two_backwards(outcomes, mode):
    assert outcome_of(outcomes, f"overlapping {mode}") == [0.0] * len(outcomes)


@pytest.mark.parametrize("mode", MODES)
def test_what_no_rank_used_has_gradients_of_zeros(outcomes, mode):
    assert outcome_of(outcomes, f"never_used {mode}") == [[]] * len(outcomes)


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_gradients_of_micro_batches_are_added_in_float32(outcomes, mode):
    # In bfloat16 256 + 1 is 256.
    for dtype, values in outcome_of(outcomes, f"half_gradients {mode}"):
        assert (dtype, values) == ("paddle.float32", {259.0 * len(outcomes)})


@pytest.mark.parametrize("mode", HALVES)
def test_bfloat16_reductions_round_what_is_sent_alone(outcomes, mode):
    # bfloat16 rounds the sum of 259 to 260, but not one micro-batch's gradient.
    whole = 260.0 if "once" in mode else 259.0
    for dtype, values in outcome_of(outcomes, f"half_gradients {mode}"):
        assert (dtype, values) == ("paddle.float32", {whole * len(outcomes)})


def test_a_shard_has_no_spec_of_its_own_and_what_fleet_reads(outcomes):
    for rare, head in outcome_of(outcomes, "specs"):
        assert (rare, head) == ((False, False), (False, True))


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        ("frozen", "is not sharded: frozen"),
        ("shape", "[2, 3] to take a shard of does not have the shape [6, 6]"),
        ("outside", "got a gradient outside of it"),
        ("no storage", "not initialized"),
    ],
)
def test_wrong_use_is_refused(outcomes, misuse, message):
    for messages in outcome_of(outcomes, "refused"):
        assert message in messages[misuse]
