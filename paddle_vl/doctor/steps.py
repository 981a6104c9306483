"""A steady training step: kernels that it launches, reads by the host, copies and waits."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from paddle import profiler

from paddle_vl.config.load import load_run_config
from paddle_vl.doctor.check import Check, Machine, Result, ok, wrong
from paddle_vl.testing import record_host_reads
from paddle_vl.testing.tiny_run import write_tiny_run
from paddle_vl.train.build import build_trainer

_WARM_UP, _STEPS = 2, 2
# Reads of host memory: messages between hosts, and kernels that only run on a CPU.
_HOST_ONLY = ("parallel/ranks.py", "nn/attention.py", "nn/cpu/")
# Substrings of CUDA's functions.
_WAITS = ("Synchronize",)
_COPIES = ("Memcpy",)
_LAUNCHES = ("LaunchKernel", "LaunchCooperative")


def checks(machine: Machine) -> list[Check]:
    return [
        Check("step.counts", "launches, copies and waits of a steady step", _counts, limit_s=90)
    ]


def _counts(machine: Machine) -> Result:
    folder = machine.folder / "counts"
    settings = ["logging.logging_steps=1000", f"train.max_steps={_WARM_UP + _STEPS + 1}"]
    trainer = build_trainer(load_run_config(write_tiny_run(folder), settings), writes=False)
    # As on a GPU; a CPU reads the flag of a bad step, which costs nothing there.
    trainer.optimizer.masks_updates = True
    try:
        for _ in range(_WARM_UP):
            trainer.train_one_step()
        with record_host_reads() as reads:
            trainer.train_one_step()
        counts = Counter()
        with profiler.Profiler(targets=_targets(machine), on_trace_ready=_nothing) as trace:
            for _ in range(_STEPS):
                trainer.train_one_step()
        # Paddle types it as unset.
        result: Any = trace.profiler_result
        for kind, name in _events(result.get_data().values()):
            counts[_class_of(kind, name)] += 1
    finally:
        trainer.feed.close()
    per_step = {name: number / _STEPS for name, number in sorted(counts.items()) if name}
    own = [place for place in reads if not place.startswith(_HOST_ONLY)]
    figures = {"per_step": per_step, "host_reads": own, "host_only_reads": len(reads) - len(own)}
    text = ", ".join(f"{number:g} {name}" for name, number in per_step.items())
    text = f"per step of a tiny model (2 micro-batches, 4 layers): {text}; {len(own)} host reads"
    if own:
        return wrong(
            f"{text}, first at {own[0]}",
            "the host waits for the device there in every step: report it",
            **figures,
        )
    return ok(text, **figures)


def _targets(machine: Machine) -> list[profiler.ProfilerTarget]:
    cpu = [profiler.ProfilerTarget.CPU]
    return [*cpu, profiler.ProfilerTarget.GPU] if machine.device == "gpu" else cpu


def _nothing(trace: Any) -> None:
    """Instead of an export."""


def _events(nodes: Any) -> Iterator[tuple[str, str]]:
    """Kind and name of every event below these nodes of a trace."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield str(node.type).rpartition(".")[2], node.name
        waiting += node.children_node
        for runtime in node.runtime_node:
            yield "runtime", runtime.name
            for event in getattr(runtime, "device_node", ()):
                yield str(event.type).rpartition(".")[2], event.name


def _class_of(kind: str, name: str) -> str:
    """What an event counts as; empty if it is not counted."""
    if kind == "DygraphKernelLaunch":
        return "operators"
    if kind == "Kernel":
        return "device kernels"
    if kind == "Memcpy":
        return f"{name.split(' ')[0]} {'to the device' if 'HtoD' in name else ''}".strip()
    if kind == "runtime":
        for words, meaning in (
            (_LAUNCHES, "launches"),
            (_COPIES, "copies"),
            (_WAITS, "waits of the host"),
        ):
            if any(word in name for word in words):
                return meaning
    return ""
