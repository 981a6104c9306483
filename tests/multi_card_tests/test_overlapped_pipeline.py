"""Stage 1's reductions during the backward pass of a pipeline, and its gathers during the forward.

Guarantees, with two stages of two sharding ranks and micro-batches with and without images: a run
with both has the bits of one without; the last stage starts its reduction before it sends the last
gradient to the stage before; all ranks issue the same collectives in the same order.
"""

from typing import Any

import numpy as np
import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.parallel.recorder import Collective, record_collectives
from paddle_vl.testing import first_difference
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_run import MODEL
from tests.support.launch import launch
from tests.support.topology_runs import PP, SHARDING, write_mixed_run

STEPS = 2
OVERLAP = (
    "parallel.fleet.sharding_configs={comm_overlap: true}",
    "parallel.sharding_gather_overlap=true",
)


def steps(run_file: str, folder: str) -> dict[str, Any]:
    """Norms and this stage's parameters after some steps of each run; calls of the last step."""
    found: dict[str, Any] = {}
    for name, more in (("plain", ()), ("overlapped", OVERLAP)):
        settings = (*SHARDING, *PP, *more, "train.gradient_accumulation_steps=4")
        config = load_run_config(run_file, [f"train.output_dir={folder}/{name}", *settings])
        trainer = build_trainer(config, writes=False)
        norms, calls = [], []
        for _ in range(STEPS):
            with record_collectives() as recording:
                norms.append(trainer.train_one_step().grad_norm.item())
            calls = recording.calls
        trainer.feed.close()
        store = trainer.optimizer.store
        store.finish_gathers()
        values = {p.name: p.numpy() for p in trainer.runner.model.parameters()}
        found[name] = norms, list(values.values()), calls
    return found | {"stage": trainer.runner.model.placement.stage_layers.head}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("run")
    run_file = write_mixed_run(folder, 24, MODEL)
    return launch(steps, 4, arguments=(str(run_file), str(folder / "out")), timeout=300)


def test_the_bits_are_those_without_overlap(ranks):
    for found in ranks:
        (norms, values, _), (wanted_norms, wanted, _) = found["overlapped"], found["plain"]
        assert norms == wanted_norms
        assert len(values) == len(wanted) > 0
        for array, expected in zip(values, wanted, strict=True):
            np.testing.assert_array_equal(array, expected)


def test_the_last_stage_reduces_before_it_sends_its_last_gradient(ranks):
    def places(calls: list[Collective], kind: str) -> list[int]:
        return [place for place, call in enumerate(calls) if call.kind == kind]

    for found in ranks:
        if not found["stage"]:
            continue
        plain, overlapped = found["plain"][2], found["overlapped"][2]
        assert places(plain, "reduce_scatter")[0] > places(plain, "send")[-1]
        assert places(overlapped, "reduce_scatter")[0] < places(overlapped, "send")[-1]


def test_all_ranks_issue_the_same(ranks):
    calls = [found["overlapped"][2] for found in ranks]
    assert first_difference(calls) is None
