"""What a training step sends and waits for beside its own work, and what that costs.

    python tools/bench_step_overhead.py                      # four processes, and one beside them
    python tools/bench_step_overhead.py --family policy

Starts processes over gloo on this machine, each with a copy of a small model (`dp`), and runs two
variants of the same training in them, in turn: `after`, the trainer as it is, and `before`, the
reference in `bench_step_before.py`. It lists per step the collectives and the host's reads of the
device, then the time of both variants, and of the metrics' collectives by themselves.

Counts hold on any machine. They are taken with updates masked on the device, as they are on a GPU;
on a CPU, where a read waits for nothing, an update's flag is read instead. What a process reads of
messages between hosts, and what Paddle's attention for CPUs reads, is no read of the device and
listed apart. Times are this machine's: on a CPU they have the collectives in them, but of reads
only the call, not the wait that they are on a GPU.

Theory, of a step of several processes with copies of the model, and of one process nothing:

- one sum of gradients per bucket of 2^25 numbers, which both variants have;
- one message between hosts with all counts, which both variants have;
- after: one sum of the loss terms and the squared gradient norm; no read;
- on a logging step one gather of all metrics, and one read of it, made while the next step runs;
- before: five sums, each of them read.

Exits with 1 where `after` has more, or where both variants do not log the same training.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from bench_step_before import Before
from paddle_vl.compat import configure_cpu_runtime
from paddle_vl.config.load import load_run_config
from paddle_vl.parallel.collectives import BUCKET_ELEMENTS
from paddle_vl.train.build import build_trainer
from paddle_vl.train.reporting.gauges import GaugeLayout, local_values
from paddle_vl.train.reporting.host_copy import HostCopy
from paddle_vl.train.trainer import Trainer
from step_counts import TurnCounts, by_kind_of_step, counted_turn

ROOT = Path(__file__).parents[1]
CONFIGS = {
    "language": ROOT / "configs" / "quickstart" / "digits.yaml",
    "policy": ROOT / "configs" / "pi07" / "tiny_cpu.yaml",
}
BATCH_SIZE, WARM_UP, REPORTS_COUNTED, TRIES = 4, 3, 3, 200


def expected_collectives(num_parameters: int, num_processes: int) -> dict[str, int]:
    """Of `after`, by the theory above."""
    if num_processes == 1:
        return {"outside": 0, "on": 0}
    steady = math.ceil(num_parameters / BUCKET_ELEMENTS) + 2
    return {"outside": steady, "on": steady + 1}


def seconds_of(turns: int, do: Callable[[], object], wait: Callable[[], None]) -> float:
    """Of one turn, until all processes have done theirs."""
    wait()
    begin = time.perf_counter()
    for _ in range(turns):
        do()
    wait()
    return (time.perf_counter() - begin) / turns


def metric_times(after: Trainer, terms: int) -> dict[str, list[float]]:
    """Seconds of what each variant does for its metrics in a step, by itself, in turn."""
    processes = after.processes
    own, norm, number = paddle.rand([terms]), paddle.rand([1]), paddle.rand([1])
    gauges = after.meter.gauges(processes.counts_data)

    def five_sums() -> None:
        processes.sum_losses(own).tolist()
        for value in (norm, number, number, number):
            processes.sum_over_all(value).item()

    def gather() -> None:
        copy = HostCopy(processes.gathered_values(local_values(gauges)))
        GaugeLayout.of(gauges).reduced(copy.read())

    does = {
        "before: five sums, read": five_sums,
        "after: one sum": lambda: processes.sum_over_all(paddle.concat([own, norm])),
        "after, logging steps: one gather, read": gather,
        "both: message between hosts": lambda: processes.agree([1] * 8),
    }
    times: dict[str, list[float]] = {name: [] for name in does}
    for _ in range(TRIES):
        for name, do in does.items():
            times[name].append(seconds_of(1, do, processes.wait))
    return times


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One process: counts of both variants, and their times where there are several processes."""
    configure_cpu_runtime(1)
    runs = {name: _build(options, name) for name in ("after", "before")}
    for trainer in runs.values():
        trainer.output_dir.mkdir(parents=True, exist_ok=True)
        trainer.reporter.open(0, trainer.num_steps)
    after, before = runs["after"], Before(runs["before"])
    turns: dict[str, Callable[[], object]] = {"after": after.turn, "before": before.turn}
    every, masks_here = options.logging_steps, after.optimizer.masks_updates
    after.optimizer.masks_updates = True
    counts: dict[str, list[TurnCounts]] = {name: [] for name in turns}
    for _ in range(WARM_UP + REPORTS_COUNTED * every + 1):
        for name, turn in turns.items():
            counts[name].append(counted_turn(turn, runs[name]))
    kinds = {
        name: by_kind_of_step(counts[name][WARM_UP:], every, reads_later=name == "after")
        for name in turns
    }
    num_parameters = sum(tensor.size for tensor in after.optimizer.tensors)
    batch, is_for_device = next(runs["before"].data), after.runner.adapter.is_for_device
    found: dict[str, Any] = {
        "family": options.family,
        "num_processes": options.nproc,
        "num_parameters": num_parameters,
        "batch_arrays": sum(_num_arrays(batch[name]) for name in batch if is_for_device(name)),
        "counts": kinds,
        "expected": expected_collectives(num_parameters, options.nproc),
        "same_training": not after.processes.is_main or log_the_same(runs.values()),
    }
    if options.nproc > 1:
        found["rounds"] = _timed(after, turns, options, masks_here)
        found["metric_times"] = metric_times(after, len(after.runner.loss.terms))
    for trainer in runs.values():
        trainer.feed.close()
        trainer.reporter.close()
    return found


def _num_arrays(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_num_arrays, value))
    return int(isinstance(value, np.ndarray))


def _build(options: argparse.Namespace, name: str) -> Trainer:
    work = Path(options.worker)
    data = {"language": "train.jsonl", "policy": "arm-joint.jsonl"}[options.family]
    config = load_run_config(
        CONFIGS[options.family],
        [
            f"train.output_dir={work / name}",
            f"data.train=[{work / 'data' / data}]",
            "data.eval=[]",
            f"data.processor={work / 'data' / 'processor'}",
            f"parallel.dp_degree={options.nproc}",
            f"train.per_device_train_batch_size={BATCH_SIZE}",
            f"train.max_steps={10**6}",
            "train.eval_steps=null",
            "train.save_steps=null",
            "train.resume_from_checkpoint=none",
            f"logging.logging_steps={options.logging_steps}",
            "logging.progress_bar=false",
        ],
    )
    return build_trainer(config)


def log_the_same(runs: Iterable[Trainer]) -> bool:
    """Whether the first reports tell the same losses and gradient norms; asked on rank 0."""
    numbers = []
    for trainer in runs:
        file = trainer.output_dir / "metrics.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        chosen = lines[:REPORTS_COUNTED]
        numbers.append([[line[key] for key in ("step", "loss", "grad_norm")] for line in chosen])
    return np.shape(numbers[0]) == np.shape(numbers[1]) and np.allclose(*numbers, rtol=1e-4)


def _timed(
    after: Trainer,
    turns: dict[str, Callable[[], object]],
    options: argparse.Namespace,
    masks_here: bool,
) -> list[dict[str, float]]:
    """Rounds of the variants in changing order, each as many steps as from report to report."""

    def masked(masks: bool) -> Callable[[], object]:
        def turn() -> None:
            after.optimizer.masks_updates = masks
            turns["after"]()

        return turn

    variants = {"before": turns["before"], "after": masked(masks_here)}
    if not masks_here:
        variants["after, masked"] = masked(True)
    rounds = []
    for number in range(max(1, options.steps // options.logging_steps)):
        names = list(variants)
        names = names[number % len(names) :] + names[: number % len(names)]
        rounds.append(
            {
                name: seconds_of(options.logging_steps, variants[name], after.processes.wait)
                for name in names
            }
        )
    return rounds


def run(options: argparse.Namespace, nproc: int, work: Path) -> dict[str, Any]:
    """Start the processes and return what rank 0 found."""
    folder = work / f"{nproc}"
    folder.mkdir()
    (folder / "data").symlink_to(work / "data")
    result = folder / "result.json"
    arguments = [__file__, "--worker", str(folder), "--nproc", str(nproc)]
    for name in ("steps", "logging_steps", "family"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(nproc)]
    launcher = [*launcher, "--log_dir", str(folder / "log")] if nproc > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *launcher, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=work,
    )
    if done.returncode or not result.exists():
        log = folder / "log" / "workerlog.0"
        raise SystemExit(log.read_text() if log.exists() else done.stdout + done.stderr)
    return json.loads(result.read_text())


def problems(found: dict[str, Any]) -> list[str]:
    """What of `after` is above the theory."""
    after, expected = found["counts"]["after"], found["expected"]
    said = [
        f"{after[kind]['num_collectives']} collectives {kind} logging steps, not {expected[kind]}"
        for kind in expected
        if after[kind]["num_collectives"] != expected[kind]
    ]
    said += [
        f"{after[kind]['num_reads']} host reads {kind} logging steps, more than {most}"
        for kind, most in (("outside", 0), ("on", 1))
        if after[kind]["num_reads"] > most
    ]
    if not found["same_training"]:
        said.append("before and after do not log the same training")
    return said


def describe(found: dict[str, Any]) -> Iterator[str]:
    """Lines of text."""
    processes, parameters = found["num_processes"], found["num_parameters"]
    arrays = found["batch_arrays"]
    yield f"{found['family']}, {processes} process(es), {parameters} parameters"
    yield f"  a batch has {arrays} arrays for the device"
    for name, kinds in found["counts"].items():
        for kind, counts in kinds.items():
            calls, reads = counts["num_collectives"], counts["num_reads"]
            yield f"  {name}, {kind} logging steps: {calls} collectives, {reads} host reads"
            for where, what, size, number in counts["collectives"]:
                yield f"      {number} x {what} of {size} bytes in {where}"
            for place, number in counts["reads"].items():
                yield f"      {number} x read at {place}"
            for place, number in counts["host_reads"].items():
                yield f"      {number} x read of no device at {place}"
    if "rounds" not in found:
        return
    rounds = found["rounds"]
    for name in rounds[0]:
        low, middle, high = quartiles([times[name] * 1e3 for times in rounds])
        text = f"  step {name}: {middle:.1f} ms (quartiles {low:.1f} to {high:.1f})"
        if name != "before":
            low, middle, high = quartiles([times[name] / times["before"] for times in rounds])
            text += f", {middle:.3f} of before in the same round ({low:.3f} to {high:.3f})"
        yield f"{text}, {len(rounds)} rounds"
    for name, times in found["metric_times"].items():
        low, middle, high = quartiles([seconds * 1e3 for seconds in times])
        yield f"  {name}: {middle:.2f} ms ({low:.2f} to {high:.2f}), {len(times)} times"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First, median and third."""
    if len(values) < 2:
        return (values[0],) * 3
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def _write_data(family: str, folder: Path) -> None:
    tool = {"language": "make_digits_dataset.py", "policy": "make_demonstrations.py"}[family]
    command = [sys.executable, str(ROOT / "tools" / tool), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=4, help="processes (default 4)")
    parser.add_argument("--steps", type=int, default=160, help="timed, of a variant (default 160)")
    parser.add_argument("--logging-steps", type=int, default=4, help="at least 3 (default 4)")
    parser.add_argument("--family", choices=sorted(CONFIGS), default="language")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.logging_steps < 3:
        parser.error("--logging-steps: from 3 on there are steps that no report is made or read in")
    if options.worker:
        found = measure(options)
        if options.nproc == 1 or dist.get_rank() == 0:
            (Path(options.worker) / "result.json").write_text(json.dumps(found))
        if options.nproc > 1:
            dist.barrier()
            # See paddle_vl.cli.main.run.
            os._exit(0)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        _write_data(options.family, Path(folder) / "data")
        all_found = [run(options, nproc, Path(folder)) for nproc in sorted({1, options.nproc})]
    said = [problem for found in all_found for problem in problems(found)]
    if options.json:
        print(json.dumps({"runs": all_found, "problems": said}))
    else:
        for line in (line for found in all_found for line in describe(found)):
            print(line)
    for problem in said:
        print("problem:", problem, file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
