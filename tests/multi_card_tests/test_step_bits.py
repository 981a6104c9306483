"""Options of a step that change no bit: reductions of gradients during the backward pass, gathers
during the forward pass, and AdamW over flat buckets.

Guarantees, on two and four ranks and micro-batches with and without images, for stage 1 of sharding
in a pipeline, data parallelism in a pipeline and around stage 3, tensor parallelism in a pipeline
with tied weights, a colocated encoder, and experts: norms, parameters, moments and powers of beta
after some steps have the bits of a run without; the first reduction starts before the backward pass
ends; all ranks issue the same collectives in the same order; a rank has its share of experts.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.parallel.mesh import expert_shards
from paddle_vl.parallel.recorder import Collective, record_collectives
from paddle_vl.parallel.summed_weights import SummedWeights
from paddle_vl.testing import first_difference
from paddle_vl.train.build import build_trainer
from tests.multi_card_tests.one_device import (
    COLOCATED,
    DP2,
    EP2,
    EP4,
    FOLDED,
    MP2,
    OVERLAPS,
    SHARDING_4,
    STAGE_2,
)
from tests.multi_card_tests.written_runs import BALANCED
from tests.single_card_tests.train.tiny_run import MODEL
from tests.support.launch import launch
from tests.support.states import states_of
from tests.support.topology_runs import PP, SHARDING, STAGE_3, write_mixed_run

STEPS = 2
NO_CLIPPING = "train.max_grad_norm=0.0"


class Case(NamedTuple):
    """A topology and what changes no bit of it.

    Attributes:
        overlap: settings of the second run; stage 3 always overlaps.
        buckets: the second run updates flat buckets.
        experts: parameters of all experts, of a model that has some.
        early, late: kinds of the reduction that begins early, and of what follows it.
    """

    ranks: int
    settings: Sequence[str]
    overlap: Sequence[str] = ()
    buckets: bool = False
    experts: int = 0
    early: str = ""
    late: str = "send"


CASES = {
    "sharding2 pp2": Case(4, (*SHARDING, *PP), OVERLAPS, early="reduce_scatter"),
    "dp2 pp2": Case(4, (*DP2, *PP), ("parallel.dp_comm_overlap=true",), early="all_reduce"),
    "dp2 sharding2 stage 3": Case(
        4, (*DP2, *SHARDING, STAGE_3), early="all_reduce", late="reduce_scatter"
    ),
    "buckets, dp2 sharding2 stage 3": Case(
        4, (*DP2, *SHARDING, STAGE_3, NO_CLIPPING), buckets=True
    ),
    "buckets, pp2 mp2": Case(4, (*PP, *MP2[:1], NO_CLIPPING), buckets=True),
    "buckets, pp2 colocated": Case(2, (*PP, COLOCATED, NO_CLIPPING), buckets=True),
}
# Two layers of eight experts.
EXPERTS = partial(Case, 4, buckets=True, experts=2 * 8 * (2 + 1) * 16 * 8)
CASES |= {
    "experts, sharding4 ep2 stage 2": EXPERTS((SHARDING_4, EP2, STAGE_2, NO_CLIPPING)),
    "experts, mp2 sharding2 ep4 stage 3": EXPERTS((*FOLDED, EP4, STAGE_3, NO_CLIPPING)),
}
NAMES = [
    pytest.param(name, marks=[pytest.mark.heavy] * bool(case.experts))
    for name, case in CASES.items()
]
OVERLAPPED = [name for name, case in CASES.items() if case.early]


def steps(run_file: str, case: Case) -> dict[str, Any]:
    """Without and with what changes no bit: norms and parameters and state after some steps, and
    calls of the last step over two ranks. And whether this stage is the last."""
    # Several buckets of the small model.
    SummedWeights.bucket_elements = 2000
    found: dict[str, Any] = {"norms": [], "values": [], "calls": []}
    for is_second in (False, True):
        more = case.overlap if is_second else ()
        overrides = ["train.output_dir=none", "train.gradient_accumulation_steps=4"]
        config = load_run_config(run_file, [*overrides, *case.settings, *more])
        trainer = build_trainer(config, writes=False)
        optimizer, store = trainer.optimizer, trainer.optimizer.store
        if case.buckets if is_second else case.early == "all_reduce":
            # Norms of sums over dp are over buckets in any case.
            num_tensors = len(optimizer.tensors)
            optimizer.use_buckets()
            assert len(optimizer.tensors) < num_tensors
        if case.early and not (case.overlap or is_second):
            # It does not know the last backward pass.
            store.begin_step = lambda num_micro_batches: None
        norms, calls = [], []
        for _ in range(STEPS):
            with record_collectives() as recording:
                norms.append(trainer.train_one_step().grad_norm.item())
            calls = [call for call in recording.calls if call.num_ranks == 2]
        trainer.feed.close()
        if hasattr(store, "finish_gathers"):
            store.finish_gathers()
        values = states_of(optimizer)
        for name, parameter in trainer.runner.model.hf_named_parameters():
            values[name] = optimizer.store.gathered_value(parameter).numpy().copy()
        for key, value in (("norms", norms), ("values", values), ("calls", calls)):
            found[key].append(value)
    if case.experts:
        table = optimizer._table
        of_experts = [store.shard_of(p) for _, p in optimizer.parameters if table[p].is_expert]
        found["experts"] = sum(shard.size for shard in of_experts if shard is not None)
        found["degrees"] = trainer.ranks.topology.degrees
    return found | {"is last": trainer.runner.model.placement.stage_layers.head}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    run_files = {
        has_experts: write_mixed_run(tmp_path_factory.mktemp("run"), 24, model)
        for has_experts, model in ((False, MODEL), (True, BALANCED))
    }

    @cache
    def launched(name: str) -> list[dict[str, Any]]:
        arguments = (str(run_files[CASES[name].experts > 0]), CASES[name])
        return launch(steps, CASES[name].ranks, arguments=arguments, timeout=600)

    return launched


@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_those_without(ranks, name):
    for found in ranks(name):
        # Buckets sum norms in another order.
        assert CASES[name].buckets or found["norms"][0] == found["norms"][1]
        wanted, values = found["values"]
        assert values.keys() == wanted.keys()
        assert any("moment1" in key for key in wanted)
        for key, array in wanted.items():
            np.testing.assert_array_equal(values[key], array, err_msg=key)
    calls = [found["calls"][1] for found in ranks(name)]
    assert first_difference(calls) is None


@pytest.mark.heavy
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.experts])
def test_a_rank_has_its_share_of_experts(ranks, name):
    """1 / (ep x ranks with the same experts) of their state; slices may be padded."""
    held = [found["experts"] for found in ranks(name)]
    degrees = ranks(name)[0]["degrees"]
    share = CASES[name].experts / degrees.ep_degree / expert_shards(degrees)
    assert sum(held) / len(held) == pytest.approx(share, rel=0.1)


@pytest.mark.parametrize("name", OVERLAPPED)
def test_the_first_reduction_starts_before_the_backward_pass_ends(ranks, name):
    case = CASES[name]

    def places(calls: list[Collective], kind: str) -> list[int]:
        return [place for place, call in enumerate(calls) if call.kind == kind]

    for found in ranks(name):
        if not found["is last"]:
            continue
        plain, overlapped = found["calls"]
        assert places(plain, case.early)[0] > places(plain, case.late)[-1]
        assert places(overlapped, case.early)[0] < places(overlapped, case.late)[-1]
        # Of several buckets of gradients.
        assert name == "sharding2 pp2" or len(places(overlapped, case.early)) > 1
