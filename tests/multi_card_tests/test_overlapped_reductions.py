"""Reductions of gradients during the backward pass, and gathers during the forward pass.

Guarantees, on four ranks and micro-batches with and without images, for stage 1 of sharding in a
pipeline, data parallelism in a pipeline, and data parallelism around stage 3: a run has the bits of
one without overlap; the first reduction starts before the backward pass ends; all ranks issue the
same collectives in the same order.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.parallel.recorder import Collective, record_collectives
from paddle_vl.parallel.summed_weights import SummedWeights
from paddle_vl.testing import first_difference
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_run import MODEL
from tests.support.launch import launch
from tests.support.topology_runs import PP, SHARDING, STAGE_3, write_mixed_run

STEPS = 2
STAGE_1 = (
    "parallel.fleet.sharding_configs={comm_overlap: true}",
    "parallel.sharding_gather_overlap=true",
)
DP, SUMS = "parallel.dp_degree=2", ("parallel.dp_comm_overlap=true",)
# Settings, those of the overlap (stage 3 always has it), the kind of the reduction that
# begins early, and of what follows it.
CASES: dict[str, tuple[Sequence[str], Sequence[str], str, str]] = {
    "sharding2 pp2": ((*SHARDING, *PP), STAGE_1, "reduce_scatter", "send"),
    "dp2 pp2": ((DP, *PP), SUMS, "all_reduce", "send"),
    "dp2 sharding2 stage 3": ((DP, *SHARDING, STAGE_3), (), "all_reduce", "reduce_scatter"),
}


def steps(run_file: str, folder: str) -> dict[str, Any]:
    """By case, for a run without and one with overlap: norms and this rank's parameters and state
    after some steps, and calls of the last step over two ranks. And whether this stage is the last.
    """
    # Several buckets of the small model.
    SummedWeights.bucket_elements = 2000
    found: dict[str, Any] = {}
    for name, (settings, overlap, _, _) in CASES.items():
        for more in ((), overlap):
            config = load_run_config(
                run_file,
                [
                    f"train.output_dir={folder}", "train.gradient_accumulation_steps=4",
                    *settings, *more,
                ],
            )  # fmt: skip
            trainer = build_trainer(config, writes=False)
            optimizer = trainer.optimizer
            store = optimizer.store
            if DP in settings and not more:
                # As with the overlap; norms are sums over buckets.
                optimizer.use_buckets()
            if not overlap and name not in found:
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
            values = [state.produce() for state in optimizer.state_to_write()]
            values += [store.gathered_value(p).numpy() for p in trainer.runner.model.parameters()]
            found.setdefault(name, []).append((norms, values, calls))
        found[f"{name} stage"] = trainer.runner.model.placement.stage_layers.head
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("run")
    run_file = write_mixed_run(folder, 24, MODEL)
    return launch(steps, 4, arguments=(str(run_file), str(folder / "out")), timeout=600)


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_without_overlap(ranks, name):
    for found in ranks:
        (wanted_norms, wanted, _), (norms, values, _) = found[name]
        assert norms == wanted_norms
        assert len(values) == len(wanted) > 0
        for array, expected in zip(values, wanted, strict=True):
            np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("name", CASES)
def test_the_first_reduction_starts_before_the_backward_pass_ends(ranks, name):
    *_, early, late = CASES[name]

    def places(calls: list[Collective], kind: str) -> list[int]:
        return [place for place, call in enumerate(calls) if call.kind == kind]

    for found in ranks:
        if not found[f"{name} stage"]:
            continue
        plain, overlapped = (calls for *_, calls in found[name])
        assert places(plain, early)[0] > places(plain, late)[-1]
        assert places(overlapped, early)[0] < places(overlapped, late)[-1]
        # Of several buckets of gradients.
        assert name == "sharding2 pp2" or len(places(overlapped, early)) > 1


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_issue_the_same(ranks, name):
    calls = [found[name][1][2] for found in ranks]
    assert first_difference(calls) is None
