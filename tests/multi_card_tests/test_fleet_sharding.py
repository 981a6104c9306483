"""Sharding stage 1 (fleet's DygraphShardingOptimizerV2) on 2, 3 and 2 x 2 ranks against one device.

The model has frozen parameters, sizes that no group size divides, a parameter that only one rank
uses, and a learning rate and decay per parameter. Each rank has its own data. Guarantees:

- losses, norms, gradients, and every parameter and moment after three clipped steps of two
  micro-batches equal one device's, also with overlapped reductions (over dp too) and gathers and
  fused states;
- a saved run continues bit-exactly; a step with an infinite norm changes nothing;
- bfloat16 gradients are accumulated, and master weights updated, in float32;
- every rank issues the same collectives, in the stated number; fleet's class does the training;
- wrong use is refused.

The checks are in `fleet_sharding_checks`.
"""

from collections import Counter

import numpy as np
import pytest

from paddle_vl.testing import first_difference
from tests.multi_card_tests.fleet_sharding_checks import OPTIONS, worker
from tests.support.launch import launch, outcome_of
from tests.support.sharding_models import toy, trained
from tests.support.tolerance import TOPOLOGY

NUM_TRAINED = len(trained(toy()))
TOPOLOGIES = {
    "2": (2, {"sharding_degree": 2}),
    # Averages over three ranks are rounded.
    "3": (3, {"sharding_degree": 3}),
    "2 x 2": (4, {"sharding_degree": 2, "dp_degree": 2}),
}
# Each option alone is for two ranks; others have none, the buffers of parameters, and all.
FEW = ("plain", "a buffer each", "all")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.heavy] * (name != "2")) for name in TOPOLOGIES],
)
def outcomes(request):
    processes, degrees = TOPOLOGIES[request.param]
    options = OPTIONS if request.param == "2" else FEW
    return launch(worker, processes, arguments=(degrees, tuple(options)))


def options_of(outcomes: list[dict]) -> list[str]:
    return [name for name in OPTIONS if f"train {name}" in outcomes[0]]


def assert_close(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        error = np.abs(np.subtract(found[name], value)).max() / max(np.abs(value).max(), 1e-12)
        assert error <= TOPOLOGY, f"{name} differs by {error}"


def test_steps_equal_one_process(outcomes):
    wanted = outcome_of(outcomes, "single")[0]
    for options in options_of(outcomes):
        ranks = [dict(of_rank) for of_rank in outcome_of(outcomes, f"train {options}")]
        losses = np.sum([of_rank["losses"] for of_rank in ranks], axis=0)
        for of_rank in ranks:
            assert_close(of_rank | {"losses": losses}, wanted)


def test_overlap_and_fused_states_change_no_bit(outcomes):
    for options in options_of(outcomes):
        # Another buffer size cuts parameters elsewhere, and the norm is summed in another order.
        plain = "a buffer each" if "comm_buffer_size_MB" in OPTIONS[options][0] else "plain"
        found = outcome_of(outcomes, f"train {options}")
        for ours, theirs in zip(found, outcome_of(outcomes, f"train {plain}"), strict=True):
            for key, value in theirs.items():
                np.testing.assert_array_equal(ours[key], value, err_msg=f"{options}: {key}")


def test_every_rank_sends_the_stated_collectives(outcomes):
    for options in options_of(outcomes):
        ranks = outcome_of(outcomes, f"collectives {options}")
        calls = [[c._replace(phase="") for c in of_rank] for of_rank in ranks]
        assert first_difference(calls) is None, options
        fleets, _ = OPTIONS[options]
        found = {
            phase: Counter(call.kind for call in ranks[-1] if call.phase == phase)
            for phase in ("forward", "backward", "end", "update")
        }
        num_buffers = NUM_TRAINED if "comm_buffer_size_MB" in fleets else 1
        reduced = Counter(reduce_scatter=num_buffers)
        # The bucket of the parameter that this rank does not use, and those after it, come late.
        early = found["backward"]["reduce_scatter"]
        assert found["forward"] == Counter(), options
        if "comm_overlap" in fleets and num_buffers > 1:
            assert 0 < early < num_buffers, options
        else:
            assert early == 0, options
        # Of the part of each buffer over dp, the last one's and those after it at the end.
        sums = Counter(all_reduce=num_buffers) if len(ranks) == 4 else Counter()
        assert found["backward"]["all_reduce"] == (early - 1 if early and sums else 0)
        assert found["backward"] + found["end"] == reduced + sums, options
        assert found["update"] == Counter(all_gather=num_buffers), options
        gathered = sum(call.num_bytes for call in ranks[0] if call.kind == "all_gather")
        scattered = sum(call.num_bytes for call in ranks[0] if call.kind == "reduce_scatter")
        assert scattered == gathered * ranks[0][-1].num_ranks, options


@pytest.mark.parametrize("options", ["plain", "fused states", "all"])
def test_what_was_saved_continues_bit_by_bit(outcomes, options):
    assert outcome_of(outcomes, f"continued {options}") == [[]] * len(outcomes)


def test_a_step_that_is_not_finite_changes_nothing(outcomes):
    assert outcome_of(outcomes, "skipped") == [[]] * len(outcomes)


def test_values_written_to_slices_reach_the_model(outcomes):
    assert outcome_of(outcomes, "written") == [[]] * len(outcomes)


@pytest.mark.parametrize("options", ["plain", "overlap"])
def test_bfloat16_gradients_of_micro_batches_are_added_in_float32(outcomes, options):
    # In bfloat16 256 + 1 is 256.
    for dtypes, values in outcome_of(outcomes, f"half_gradients {options}"):
        assert dtypes == {"paddle.float32", "paddle.bfloat16"}
        assert list(values) == [pytest.approx(259.0 * len(outcomes), rel=1e-6)]


def test_bfloat16_steps_equal_one_process(outcomes):
    wanted = outcome_of(outcomes, "half single")[0]
    for found in outcome_of(outcomes, "half"):
        assert_close(found, wanted)
        master = found["units.0.weight/master_weight"]
        assert (master != found["units.0.weight"]).any()


def test_the_class_that_trains_is_fleets(outcomes):
    module = "paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer"
    for found in outcome_of(outcomes, "classes"):
        assert found == ("DygraphShardingOptimizerV2", module, "AdamW")


def test_fused_states_share_fleets_buffer(outcomes):
    assert outcome_of(outcomes, "fused") == [True] * len(outcomes)


def test_slices_keep_the_specs_of_their_parameters(outcomes):
    for position, is_distributed in ((0, False), (1, True)):
        seen = {of_rank[position] for of_rank in outcome_of(outcomes, "specs")}
        assert {(True, is_distributed)} <= seen <= {(True, is_distributed), None}


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        ("frozen", "is not sharded: frozen"),
        ("shape", "[2, 3] to take a shard of does not have the shape [11, 6]"),
    ],
)
def test_wrong_use_is_refused(outcomes, misuse, message):
    for messages in outcome_of(outcomes, "refused"):
        assert message in messages[misuse]
