"""What a training step sends and reads besides its model, and what that costs.

    python tools/benchmarks/overhead.py                    # four ranks over gloo, and one
    python tools/benchmarks/overhead.py --family pi07

Trains a small model with data parallelism on this machine, and counts the collectives of a step and
its host reads of the device; then it times whole steps, and the collectives of the metrics alone.

Counts hold on any machine. They are taken with updates masked on the device over flat buckets, as
on a GPU; on a CPU, where a read waits for nothing, a flag is read instead. Reads of messages
between hosts, and of Paddle's attention for CPUs, are not reads of the device and listed apart.
Times are this machine's, with buckets too.

Expected per step on several ranks, and nothing on one:

- one all-reduce of gradients per bucket of 2^25 numbers;
- one message between hosts with all counts;
- one all-reduce of the loss terms and the squared gradient norm; no read;
- on a logging step one all-gather of all metrics, read while the next step runs.

Exits with 1 if a step has more.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from harness import (
    ROOT,
    STEPS_ONLY,
    Table,
    launch,
    leave,
    make_data,
    overrides,
    parser,
    show,
    spread,
)
from paddle_vl.compat import configure_cpu_runtime
from paddle_vl.config.load import load_run_config
from paddle_vl.parallel.collectives import BUCKET_ELEMENTS
from paddle_vl.train.build import build_trainer
from paddle_vl.train.reporting.gauges import GaugeLayout, HostCopy, local_values
from paddle_vl.train.trainer import Trainer
from step_counts import by_kind_of_step, counted_turn

CONFIGS = {"qwen3_vl": "configs/quickstart/digits.yaml", "pi07": "configs/pi07/tiny_cpu.yaml"}
BATCH_SIZE, WARM_UP, REPORTS_COUNTED, TRIES = 4, 3, 3, 200


def expected_collectives(num_parameters: int, num_ranks: int) -> dict[str, int]:
    """Collectives outside of and on logging steps, by the list above."""
    if num_ranks == 1:
        return {"outside": 0, "on": 0}
    steady = math.ceil(num_parameters / BUCKET_ELEMENTS) + 2
    return {"outside": steady, "on": steady + 1}


def seconds_of(turns: int, do: Callable[[], object], wait: Callable[[], None]) -> float:
    """Seconds of one call, averaged, until all ranks are done."""
    wait()
    begin = time.perf_counter()
    for _ in range(turns):
        do()
    wait()
    return (time.perf_counter() - begin) / turns


def metric_times(trainer: Trainer) -> dict[str, list[float]]:
    """Seconds of the messages of a step besides gradients, each alone."""
    ranks = trainer.ranks
    terms_and_norm = paddle.rand([len(trainer.runner.loss.terms) + 1])
    gauges = trainer.meter.gauges(ranks.counts_data)

    def gather() -> None:
        copy = HostCopy(ranks.gathered_values(local_values(gauges)))
        GaugeLayout.of(gauges).reduced(copy.read())

    does = {
        "message between hosts": lambda: ranks.agree([1] * 8),
        "all-reduce of losses and norm": lambda: ranks.sum_over_all(terms_and_norm),
        "on logging steps: all-gather, read": gather,
    }
    times: dict[str, list[float]] = {name: [] for name in does}
    for _ in range(TRIES):
        for name, do in does.items():
            times[name].append(seconds_of(1, do, ranks.wait))
    return times


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Counts of one rank; on several ranks times too."""
    configure_cpu_runtime(1)
    work, every = Path(options.worker), options.logging_steps
    settings = STEPS_ONLY | {
        "train.output_dir": work / "out",
        "data.train": f"[{options.data}]",
        "data.eval": "[]",
        "data.processor": Path(options.data).parent / "processor",
        "parallel.dp_degree": options.nproc,
        "train.per_device_train_batch_size": BATCH_SIZE,
        "logging.logging_steps": every,
    }
    trainer = build_trainer(load_run_config(ROOT / CONFIGS[options.family], overrides(settings)))
    trainer.output_dir.mkdir(parents=True, exist_ok=True)
    trainer.reporter.open(0, trainer.num_steps)
    masks_here, trainer.optimizer.masks_updates = trainer.optimizer.masks_updates, True
    trainer.optimizer.use_buckets()
    counts = [
        counted_turn(trainer.turn, trainer) for _ in range(WARM_UP + REPORTS_COUNTED * every + 1)
    ]
    trainer.optimizer.masks_updates = masks_here
    num_parameters = sum(tensor.size for tensor in trainer.optimizer.tensors)
    adapter = trainer.runner.adapter
    batch, is_for_device = adapter.prepared(next(trainer.data)), adapter.is_for_device
    found: dict[str, Any] = {
        "family": options.family,
        "num_ranks": options.nproc,
        "num_parameters": num_parameters,
        "batch_arrays": sum(_num_arrays(batch[name]) for name in batch if is_for_device(name)),
        "counts": by_kind_of_step(counts[WARM_UP:], every),
        "expected": expected_collectives(num_parameters, options.nproc),
    }
    if options.nproc > 1:
        rounds = range(max(1, options.steps // every))
        steps = [seconds_of(every, trainer.turn, trainer.ranks.wait) for _ in rounds]
        found["times"] = {"step": steps, **metric_times(trainer)}
    trainer.feed.close()
    trainer.reporter.close()
    return found


def _num_arrays(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_num_arrays, value))
    return int(isinstance(value, np.ndarray))


def run(options: argparse.Namespace, nproc: int, data: Path, work: Path) -> dict[str, Any]:
    """What rank 0 found."""
    arguments = ["--worker", str(work), "--data", str(data), "--nproc", str(nproc)]
    for name in ("steps", "logging_steps", "family"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return launch(__file__, nproc, arguments, work)[0]


def problems(found: dict[str, Any]) -> list[str]:
    """Counts above the expected ones."""
    counts, expected = found["counts"], found["expected"]
    said = [
        f"{counts[kind]['num_collectives']} collectives {kind} logging steps, not {expected[kind]}"
        for kind in expected
        if counts[kind]["num_collectives"] != expected[kind]
    ]
    said += [
        f"{counts[kind]['num_reads']} host reads {kind} logging steps, more than {most}"
        for kind, most in (("outside", 0), ("on", 1))
        if counts[kind]["num_reads"] > most
    ]
    return said


def tables(all_found: list[dict[str, Any]]) -> Iterator[Table]:
    """Counts and times."""
    family = all_found[0]["family"]
    rows = []
    for found in all_found:
        for label, key in (("collectives", "num_collectives"), ("host reads", "num_reads")):
            numbers = [str(found["counts"][kind][key]) for kind in ("outside", "on")]
            rows.append([f"{label}, {found['num_ranks']} rank(s)", *numbers])
    last = all_found[-1]
    note = f"{last['batch_arrays']} arrays of a batch are copied to the device."
    yield Table(f"overhead {family} counts", ["per step", "most", "logging"], rows, note)
    if "times" in last:
        rows = [[name, spread(1e3 * s for s in seconds)] for name, seconds in last["times"].items()]
        note = (
            f"{last['num_parameters'] / 1e6:.1f} million parameters, {last['num_ranks']} ranks "
            f"with one thread each, float32; {len(last['times']['step'])} rounds of steps. Medians "
            "and quartiles."
        )
        yield Table(f"overhead {family} times", ["", "ms"], rows, note)


def details(all_found: list[dict[str, Any]]) -> Iterator[str]:
    """Every collective and read, line by line."""
    for found in all_found:
        for kind, counts in found["counts"].items():
            yield f"{found['family']}, {found['num_ranks']} rank(s), {kind} logging steps:"
            for where, what, size, number in counts["collectives"]:
                yield f"  {number} x {what} of {size} bytes in {where}"
            for place, number in counts["reads"].items():
                yield f"  {number} x read at {place}"
            for place, number in counts["host_reads"].items():
                yield f"  {number} x read of no device at {place}"


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--nproc", type=int, default=4, help="ranks (default 4)")
    made.add_argument("--steps", type=int, default=160, help="timed steps (default 160)")
    made.add_argument("--logging-steps", type=int, default=4, help="at least 3 (default 4)")
    made.add_argument("--family", choices=CONFIGS, default="qwen3_vl")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    made.add_argument("--data", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.logging_steps < 3:
        made.error("--logging-steps: below 3 every step makes or reads a report")
    if options.worker:
        leave(measure(options), Path(options.worker))
    with tempfile.TemporaryDirectory() as folder:
        data = make_data(options.family, Path(folder) / "data")
        try:
            all_found = [
                run(options, nproc, data, Path(folder) / str(nproc))
                for nproc in sorted({1, options.nproc})
            ]
        except RuntimeError as error:
            print(f"overhead: a run failed:\n{error}", file=sys.stderr)
            return 1
    said = [problem for found in all_found for problem in problems(found)]
    if not options.json:
        print("\n".join(details(all_found)), end="\n\n")
    show(options, list(tables(all_found)), {"runs": all_found, "problems": said})
    for problem in said:
        print("problem:", problem, file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
