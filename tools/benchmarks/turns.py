"""Timed turns of the training loop on one rank, and collectives by phase of a step.

Used with the package of any checkout (`topologies.py --against`).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

WARM_UP = 3
NO_PHASE = "no phase"


def timed_turns(
    config: str,
    settings: list[str],
    steps: int,
    around: Callable[[Any], AbstractContextManager[None]] = nullcontext,
) -> dict[str, Any]:
    """Build a trainer, warm up, count one turn and time the next ones.

    Args:
        steps: number of timed turns.
        around: called with the trainer; its context is that of the counted turn.

    Returns:
        Milliseconds of the fastest turn; collectives, messages and bytes of a turn, and its
        calls; MiB of peak resident memory beyond that before the trainer was built.
    """
    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.config.load import load_run_config
    from paddle_vl.parallel.recorder import record_collectives
    from paddle_vl.train.build import build_trainer

    configure_cpu_runtime(1)
    before = resident("VmRSS")
    trainer = build_trainer(load_run_config(config, settings))
    trainer.output_dir.mkdir(parents=True, exist_ok=True)
    trainer.reporter.open(0, trainer.num_steps)
    for _ in range(WARM_UP):
        trainer.turn()
    with around(trainer), record_collectives() as recording:
        trainer.turn()
    times = []
    for _ in range(steps):
        trainer.ranks.wait()
        begin = time.perf_counter()
        trainer.turn()
        trainer.ranks.wait()
        times.append(time.perf_counter() - begin)
    trainer.feed.close()
    trainer.reporter.close()
    calls = recording.calls
    return {
        # Other work on the machine only makes steps slower.
        "milliseconds": 1e3 * min(times),
        "collectives": sum(not call.is_message for call in calls),
        "messages": sum(call.is_message for call in calls),
        "bytes": sum(call.num_bytes for call in calls),
        "mib": (resident("VmHWM") - before) / 2**20,
        "calls": [(call.is_message, list(call.shape), call.num_bytes) for call in calls],
    }


@contextmanager
def recorded_phases() -> Iterator[Any]:
    """Record collectives with their phase of a step; outside of phases it is `NO_PHASE`."""
    from paddle_vl.parallel.recorder import record_collectives
    from paddle_vl.train.phases import Phase, PhaseClock

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


def resident(name: str) -> int:
    """Resident bytes of this process: now (VmRSS) or peak (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {name}")
