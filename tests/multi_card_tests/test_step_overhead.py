"""Collectives and host reads of a training step on several ranks.

Guarantees, with data parallelism, in a pipeline, and with a colocated encoder:

- a step without logging reads the device once, before its update. It issues one all-gather of host
  values, one all-reduce of losses, gradient norm and parameters with a gradient, and the
  collectives of the parallelism;
- a logging step adds one gather, and one read, made while the next step runs;
- all ranks issue the same collectives in the same order;
- the logged values equal those of a separate gather per value.

Updates are over flat buckets, as on a GPU.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.distributed as dist
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
    """A run's turns with their counts; its metrics, and those from separate gathers."""
    overrides = [f"train.output_dir={output_dir}", f"train.max_steps={STEPS}", override]
    overrides += ["train.save_steps=null", f"logging.logging_steps={LOGGING_STEPS}"]
    trainer = build_trainer(load_run_config(run_file, overrides))
    trainer.optimizer.use_buckets()
    turns, collected, own_sums, counts = [], [], [], []
    turn, collect = trainer.turn, trainer.reporter.collect
    train_one_step, sum_over_all = trainer.train_one_step, trainer.ranks.sum_over_all

    def counted():
        with recorded_phases() as recording, record_host_reads() as reads:
            turn()
        of_device = [place for place in reads if not place.startswith(HOST_ONLY)]
        turns.append(Turn(trainer.step, recording.calls, of_device))

    def seen_step():
        outcome = train_one_step()
        counts.append(outcome.totals.counts)
        return outcome

    def seen_sum(value):
        own_sums.append(value.clone())
        return sum_over_all(value)

    def seen_report(step, own, make_line, *others):
        collected.append((step, own, make_line))
        collect(step, own, make_line, *others)

    trainer.turn, trainer.train_one_step = counted, seen_step
    trainer.ranks.sum_over_all, trainer.reporter.collect = seen_sum, seen_report
    trainer.run()
    lines = []
    for step, own, make_line in collected:
        values = {name: separately_gathered(value) for name, value in own.items()}
        lines.append({"step": step, **make_line(values)})
    sums = [
        [all_reduced(value, dist.ReduceOp.SUM).item() for value in values] for values in own_sums
    ]
    return {
        "turns": turns,
        "metrics": metrics_of(output_dir),
        "lines": lines,
        "sums": sums,
        "counts": counts,
        "override": override,
    }


def all_reduced(value: paddle.Tensor, operation: Any) -> paddle.Tensor:
    total = value.reshape([1]).clone()
    dist.all_reduce(total, operation)
    return total


def separately_gathered(value: Any) -> np.ndarray:
    """The values of both ranks, gathered alone: `[P]`, or `[P, n]` for a tensor."""
    is_tensor = isinstance(value, paddle.Tensor)
    own = value.reshape([-1]) if is_tensor else paddle.to_tensor([value])
    everyone: list[paddle.Tensor] = []
    dist.all_gather(everyone, own.astype("float64"))
    values_Pn = np.stack([each.numpy() for each in everyone])
    return values_Pn if is_tensor else values_Pn[:, 0]


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


def test_what_is_logged_is_what_separate_gathers_give(ranks):
    # Both ranks have the same lines, so these include the second rank's values.
    assert ranks[0]["lines"] == ranks[1]["lines"]
    assert ranks[0]["metrics"] == ranks[0]["lines"]
    assert [line["step"] for line in ranks[0]["metrics"]] == [*LOGGED, STEPS]


def test_loss_and_norm_are_those_of_separate_sums(ranks):
    sums, counts = ranks[0]["sums"], [count for (count,) in ranks[0]["counts"]]
    begin = 0
    for line in ranks[0]["metrics"]:
        window = range(begin, line["step"])
        total = sum(sums[step][0] * counts[step] for step in window)
        wanted = total / sum(counts[step] for step in window)
        assert line["loss"] == pytest.approx(wanted, rel=1e-6)
        assert line["grad_norm"] == pytest.approx(sums[line["step"] - 1][1] ** 0.5, rel=1e-6)
        begin = line["step"]
