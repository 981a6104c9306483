"""Fleet's pipeline schedules under the package's runner, on linear chunks with known results.

Guarantees, for every schedule and for micro-batch counts that it allows:

- fleet's class for the schedule runs;
- loss terms and every gradient equal one device's, with micro-batches of different lengths;
- an evaluation of any number of batches, between training steps, gives their sums;
- a step sends the theoretical number of messages, and shapes only if they are dynamic;
- messages are as large as the step's largest micro-batch, or as the reserved size;
- nothing grows from step to step; a frozen chunk sends its rows on.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import paddle
import pytest

from paddle_vl.config.parallel_settings import FleetConfig
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.pipeline.runner import PipelineRunner
from paddle_vl.parallel.pipeline.schedule import num_chunks
from paddle_vl.parallel.recorder import record_collectives
from paddle_vl.parallel.topology import initialize
from tests.support.launch import launch, outcome_of, run_checks

STAGES, WIDTH = 3, 3
VIRTUAL = {"num_virtual_stages": 2}
BATCHED = {"use_batch_p2p_comm": True}
# Name -> settings, micro-batch counts, fleet's class.
SCHEDULES = {
    "1f1b": ({}, [3, 5], "PipelineParallel"),
    "dynamic": ({"pp_shapes": "dynamic"}, [3, 5], "PipelineParallel"),
    "interleaved": (VIRTUAL, [6, 8], "PipelineParallelWithInterleave"),
    "fthenb": (
        VIRTUAL | {"pp_schedule": "fthenb"}, [3, 6], "PipelineParallelWithInterleaveFthenB",
    ),
    "balanced_memory": (
        VIRTUAL | {"pp_schedule": "balanced_memory"}, [3, 6], "VPPFhenBInBalancedMemory",
    ),
    "dualpipev": ({"pp_schedule": "dualpipev"}, [6, 8], "DualPipeVParallel"),
    # As on GPUs, with fleet's own options.
    "1f1b_batched": ({"options": BATCHED}, [3], "PipelineParallel"),
    "interleaved_batched": (
        VIRTUAL | {"options": BATCHED}, [8], "PipelineParallelWithInterleave",
    ),
    "interleaved_overlapped": (
        VIRTUAL | {"options": {"overlap_p2p_comm": True}}, [8], "PipelineParallelWithInterleave",
    ),
    "interleaved_unbalanced": (
        VIRTUAL | {"options": {"best_unbalanced_scheduler": True}}, [8],
        "PipelineParallelWithInterleave",
    ),
    "balanced_memory_batched": (
        VIRTUAL | {"pp_schedule": "balanced_memory", "options": BATCHED}, [6],
        "VPPFhenBInBalancedMemory",
    ),
}  # fmt: skip
LONGEST, RESERVED = 6, 9


@dataclass
class LinearChunk:
    """A product with a matrix; the last chunk's output is the sum of all rows."""

    number: int
    num_chunks: int
    weight: paddle.Tensor

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.num_chunks - 1

    def input_shape(self, batch: dict) -> tuple[int, int]:
        return len(batch["rows"]), WIDTH

    def reserved_shape(self, batch: dict, rows: SimpleNamespace) -> tuple[int, int]:
        return rows.tokens, WIDTH

    def __call__(self, batch: dict, rows: paddle.Tensor | None = None) -> paddle.Tensor:
        rows = paddle.to_tensor(batch["rows"]) if rows is None else rows
        assert len(rows) == len(batch["rows"])
        return paddle.tanh(rows @ self.weight)


class Objective:
    terms: ClassVar = {"loss": 1.0}

    def share(self, output, totals, num_batches):
        loss = (output * output).sum() / totals[0]
        return loss, loss.detach().reshape([1])

    def sums(self, output):
        return (output * output).sum().reshape([1])


def make_chunks(count: int, frozen: bool) -> list[LinearChunk]:
    rng = np.random.default_rng(0)
    chunks = []
    for number in range(count):
        weight = paddle.to_tensor(rng.standard_normal((WIDTH, WIDTH)).astype("float32"))
        weight.stop_gradient = frozen and number == 0
        chunks.append(LinearChunk(number, count, weight))
    return chunks


def make_batches(count: int) -> list[dict]:
    rng = np.random.default_rng(1)
    lengths = [1 + i % LONGEST for i in range(count)]
    return [{"rows": rng.standard_normal((n, WIDTH)).astype("float32")} for n in lengths]


def make_runner(settings: dict, num_batches: int, frozen: bool = False, reserved=None):
    settings = dict(settings)
    options = FleetConfig(pp_configs=settings.pop("options", {}))
    degrees = ParallelDegrees(pp_degree=STAGES, num_micro_batches=num_batches, **settings)
    topology = initialize(degrees, options)
    ends = []
    store = SimpleNamespace(end_micro_batch=lambda: ends.append(1))
    chunks = make_chunks(num_chunks(degrees), frozen)
    arguments = chunks, degrees, topology.pp_rank, "float32", Objective(), None
    runner = PipelineRunner(SimpleNamespace(), *arguments, reserved=reserved)
    runner.stage = topology.pp_rank
    return runner, store, ends


def expected(num_chunks: int, batches: list[dict]) -> tuple[float, list[np.ndarray]]:
    chunks, total = make_chunks(num_chunks, False), 0.0
    for batch in batches:
        rows = None
        for chunk in chunks:
            rows = chunk(batch, rows)
        loss, _ = Objective().share(rows, [10], 1)
        loss.backward()
        total += loss.item()
    return total, [chunk.weight.grad.numpy() for chunk in chunks]


def check(name: str, settings: dict, num_batches: int, frozen: bool) -> None:
    """Two steps with evaluations between them, against one device."""
    runner, store, ends = make_runner(settings, num_batches, frozen)
    batches = make_batches(num_batches)
    wanted, gradients = expected(len(runner.chunks), batches)
    assert type(runner.engine).__name__ == SCHEDULES[name][2]
    has_last = len(runner.chunks) - 1 in runner.own_chunks
    for _ in range(2):
        del ends[:]
        with record_collectives() as recording:
            terms = runner.accumulate_gradients(batches, [10], store)
        assert terms.shape == [1]
        np.testing.assert_allclose(terms.item(), wanted if has_last else 0.0, rtol=1e-5)
        for number in runner.own_chunks:
            weight = runner.chunks[number].weight
            if weight.stop_gradient:
                assert weight.grad is None
                continue
            np.testing.assert_allclose(
                weight.grad.numpy(), gradients[number], rtol=1e-4, atol=1e-6, err_msg=str(number)
            )
            weight.clear_gradient(False)
        assert len(ends) >= num_batches * len(runner.own_chunks)
        for count in (1, 2, 3):
            few = batches[:count]
            sums = runner.loss_sums(few).item()
            alone, _ = expected(len(runner.chunks), few)
            np.testing.assert_allclose(sums, alone * 10 if has_last else 0.0, rtol=1e-5)
    kinds = Counter(call.kind for call in recording.calls)
    # A shape takes two messages: its length and its values.
    factor = 3 if name == "dynamic" else 1
    one_way = factor * num_messages(name, runner.stage, num_batches)
    assert kinds == {"send": one_way, "recv": one_way}
    lengths = {len(batch["rows"]) for batch in batches}
    rows = {call.shape[0] for call in recording.calls if len(call.shape) == 2}
    assert rows == (lengths if name == "dynamic" else {max(lengths)})
    # Only one step's shapes are kept, at most two per micro-batch and end.
    assert len(getattr(runner.engine._p2p_helper, "_send_recv_meta_list", [])) <= 4 * num_batches


def reserved_rows() -> None:
    runner, *_ = make_runner({}, 4, reserved=SimpleNamespace(tokens=RESERVED, visual=0))
    with record_collectives() as recording:
        runner.accumulate_gradients(make_batches(4), [10])
    assert {call.shape[0] for call in recording.calls} == {RESERVED}


# With the last micro-batch count the first chunk is frozen.
CASES = {
    f"{name} {count}": partial(check, name, settings, count, count == counts[-1])
    for name, (settings, counts, _) in SCHEDULES.items()
    for count in counts
} | {"reserved rows": reserved_rows}


def num_messages(name: str, stage: int, count: int) -> int:
    """Messages that a stage sends in a step: forward from each chunk except the model's last one,
    backward from each except the first. In a V schedule the last stage sends none between its own
    chunks."""
    if name == "dualpipev":
        return count * (2 if stage in (0, STAGES - 1) else 4)
    chunks = SCHEDULES[name][0].get("num_virtual_stages", 1)
    return count * (2 * chunks - (stage in (0, STAGES - 1)))


def worker() -> dict:
    return run_checks(CASES)


@pytest.fixture(scope="module")
def outcomes():
    return launch(worker, STAGES)


@pytest.mark.parametrize("case", CASES)
def test_schedule_equals_one_device(outcomes, case):
    outcome_of(outcomes, case)
