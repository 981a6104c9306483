"""One process's side of a profile: steps of the run's own trainer, under a clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_vl.parallel.pipeline.runner import PipelineRunner
from paddle_vl.profile.last_words import MemoryLimitError
from paddle_vl.profile.memory import MemoryMeter
from paddle_vl.train.phases import Phase, PhaseClock, phase
from paddle_vl.train.processes import SingleProcess
from paddle_vl.train.trainer import Trainer


@dataclass(frozen=True)
class RankMeasure:
    """What one process measured. Differs per rank, the counts of work do not.

    Attributes:
        steps: seconds by phase (`Phase` values) of each measured step.
        cpu_seconds: of each measured step, what the process' threads have worked on this machine's
            processors: on a CPU the step's work whatever else the machine does, beside a GPU what
            driving it costs.
        samples, tokens: of all processes in each of these steps; tokens are 0 where the family
            does not count them.
        allocated, reserved: peak bytes during the measured steps, see `paddle_vl.profile.memory`.
        memory_source: what those two are.
    """

    rank: int
    steps: list[dict[str, float]]
    cpu_seconds: list[float]
    samples: list[int]
    tokens: list[int]
    allocated: int
    reserved: int
    memory_source: str


def measure(
    trainer: Trainer,
    meter: MemoryMeter,
    *,
    rank: int,
    warmup_steps: int,
    steps: int,
    memory_limit: int | None = None,
) -> RankMeasure:
    """Take the trainer's next steps, the first of them unseen. Called by all processes together.

    The peak of memory is reset between the two; above the limit all processes end after the step.

    Raises:
        MemoryLimitError: on the processes above the limit, and on the others a RuntimeError.
    """
    clock, processes = PhaseClock(), trainer.processes
    seen, cpu_seconds = [], []
    _mark_pipeline(trainer.runner)

    def check() -> None:
        if memory_limit is not None:
            _check_limit(meter.peak().reserved, memory_limit, rank, processes)

    for _ in range(warmup_steps):
        trainer.train_one_step()
        check()
    processes.wait()
    meter.reset()
    for _ in range(steps):
        begin = time.process_time()
        with clock.step():
            seen.append(trainer.train_one_step())
        cpu_seconds.append(time.process_time() - begin)
        check()
    peak = meter.peak()
    return RankMeasure(
        rank=rank,
        steps=[{name.value: value for name, value in step.items()} for step in clock.steps],
        cpu_seconds=cpu_seconds,
        samples=[outcome.totals.num_samples for outcome in seen],
        tokens=[outcome.totals.num_tokens for outcome in seen],
        allocated=peak.allocated,
        reserved=peak.reserved,
        memory_source=meter.source,
    )


def _check_limit(used: int, limit: int, rank: int, processes: SingleProcess) -> None:
    is_over = used > limit
    if not int(processes.sum_over_all(paddle.to_tensor(int(is_over)))):
        return
    if is_over:
        raise MemoryLimitError(f"rank {rank}", used, limit)
    raise RuntimeError(f"rank {rank} stops: another process is above the limit of memory")


def _mark_pipeline(runner: Any) -> None:
    """Give a pipeline's micro-batches one phase: it does forwards and backwards in turn."""
    if isinstance(runner, PipelineRunner):
        runner.accumulate_gradients = _in_phase(runner.accumulate_gradients)


def _in_phase(function: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with phase(Phase.FORWARD_BACKWARD):
            return function(*args, **kwargs)

    return marked
