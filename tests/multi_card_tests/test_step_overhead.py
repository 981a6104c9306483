"""Collectives and host reads of a training step on several ranks.

Guarantees, with data parallelism, in a pipeline, and with a colocated encoder:

- a step without logging reads the device once, before its update. It issues one all-gather of host
  values, one all-reduce of losses, gradient norm and parameters with a gradient, and the
  collectives of the parallelism;
- a logging step adds one gather, and one read, made while the next step runs;
- all ranks issue the same collectives in the same order, and log the same lines.

Updates are over flat buckets, as on a GPU.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.parallel.recorder import record_collectives
from paddle_vl.testing import Collective, first_difference, record_host_reads
from paddle_vl.train.build import build_trainer
from paddle_vl.train.phases import Phase, PhaseClock
from tests.support.finished_runs import metrics_of
from tests.support.launch import launch

COLOCATED = "parallel={pp_degree: 2, schedule: colocated}"
TOPOLOGIES = {
    "dp2": "parallel.dp_degree=2", "pp2": "parallel.pp_degree=2", "pp2 colocated": COLOCATED,
}  # fmt: skip
STEPS, LOGGING_STEPS = 8, 3
# Steady steps neither log nor follow a logging step. The last step also saves.
STEADY, LOGGED = (1, 2, 5), (3, 6)
# Files that read messages between hosts, or that only run on a CPU: not reads of the device.
HOST_ONLY = ("parallel/ranks.py", "nn/attention_masks.py", "nn/cpu/")


NO_PHASE = "no phase"


@contextmanager
def recorded_phases() -> Iterator[Any]:
    """Record collectives with their phase of a step; outside of phases it is `NO_PHASE`."""

    class NamingClock(PhaseClock):
        """Tells the recording the phase of the step."""

        def inside(self, name: Phase) -> AbstractContextManager[None]:
            return self._named(name)

        @contextmanager
        def _named(self, name: Phase) -> Iterator[None]:
            around, recording.phase = recording.phase, name.value
            try:
                with super().inside(name):
                    yield
            finally:
                recording.phase = around

    with record_collectives() as recording:
        recording.phase = NO_PHASE
        with NamingClock().step():
            yield recording


class Turn(NamedTuple):
    """Collectives, and places of host reads of the device, in a turn of the training loop."""

    step: int
    collectives: list[Collective]
    reads: list[str]


def whole_run(run_file: str, output_dir: Path, override: str) -> dict[str, Any]:
    """A run's turns with their counts, and its metrics."""
    overrides = [f"train.output_dir={output_dir}", f"train.max_steps={STEPS}", override]
    overrides += ["train.save_steps=null", f"logging.logging_steps={LOGGING_STEPS}"]
    trainer = build_trainer(load_run_config(run_file, overrides))
    trainer.optimizer.use_buckets()
    turns, turn = [], trainer.turn

    def counted():
        with recorded_phases() as recording, record_host_reads() as reads:
            turn()
        of_device = [place for place in reads if not place.startswith(HOST_ONLY)]
        turns.append(Turn(trainer.step, recording.calls, of_device))

    trainer.turn = counted
    trainer.run()
    return {"turns": turns, "metrics": metrics_of(output_dir), "override": override}


@pytest.fixture(scope="module", params=TOPOLOGIES)
def ranks(request, run_file, tmp_path_factory) -> list[dict[str, Any]]:
    """Results of both ranks."""
    output_dir = tmp_path_factory.mktemp("runs") / "out"
    override = TOPOLOGIES[request.param]
    return launch(whole_run, 2, arguments=(str(run_file), output_dir, override))


def test_a_step_reads_its_norm_and_a_report_that_of_the_step_before(ranks):
    for rank in ranks:
        reads = {turn.step: turn.reads for turn in rank["turns"] if turn.step < STEPS}
        files = {step: [place.split(":")[0] for place in places] for step, places in reads.items()}
        behind = {step + 1: ["train/reporting/reporter.py"] for step in LOGGED}
        assert files == {step: ["train/step.py", *behind.get(step, [])] for step in files}


def test_a_steady_step_sends_one_message_and_one_sum_besides_its_parallelism(ranks):
    for rank in ranks:
        for turn in (turn for turn in rank["turns"] if turn.step in STEADY):
            calls = Counter((call.phase, call.kind) for call in turn.collectives)
            # Over dp, the flat buckets with and without weight decay, each in place. In a
            # pipeline, the tied embedding's gradient, and the colocated encoder's gradients.
            sums = {"parallel.dp_degree=2": 2, "parallel.pp_degree=2": 1, COLOCATED: 2}
            found = calls.pop((Phase.GRADIENT_SUM.value, "all_reduce"))
            assert found == sums[rank["override"]]
            assert calls.pop((Phase.AGREEMENT.value, "all_gather")) == 1
            assert calls.pop((Phase.CLIP.value, "all_reduce")) == 1
            messages = Phase.FORWARD_BACKWARD.value
            if rank["override"] == COLOCATED:
                # The bridge: rows to the data lane, gradients to the ranks that encoded them.
                assert calls.pop((messages, "all_gather")) == 1
                assert calls.pop((messages, "reduce_scatter")) == 1
            assert set(calls) <= {(messages, "send"), (messages, "recv")}


def test_a_logging_step_adds_one_gather(ranks):
    for rank in ranks:
        turns = {turn.step: turn.collectives for turn in rank["turns"]}
        steady = Counter((call.phase, call.kind) for call in turns[STEADY[0]])
        for step in LOGGED:
            calls = Counter((call.phase, call.kind) for call in turns[step])
            assert calls - steady == {(NO_PHASE, "all_gather"): 1}
            assert not steady - calls


def test_all_ranks_send_the_same_in_the_same_order(ranks):
    calls = [[call for turn in rank["turns"] for call in turn.collectives] for rank in ranks]
    assert calls[0]
    assert first_difference(calls) is None
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    assert [line["step"] for line in ranks[0]["metrics"]] == [*LOGGED, STEPS]
