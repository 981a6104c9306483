"""Steps of small models over several processes: time, messages, bytes and memory by topology.

    python tools/bench_topologies.py
    python tools/bench_topologies.py --against ../before      # another checkout, and ratios to it
    python tools/bench_topologies.py --models language --topologies mp2 pp2 --rounds 5

Trains a small Qwen3-VL (`configs/quickstart/digits.yaml`) and a small policy
(`configs/pi07/tiny_cpu.yaml`) over processes of this machine, over gloo. With `--against` the same
runs are made with the package of another checkout, in turn, both within every round, so that what
else the machine does meets both; which comes first changes from round to round.

A row per topology: the fastest step (the median of the rounds); collectives and messages of one
step of one process and their bytes, of the process with most; the most memory (resident) that a
process took beyond what it had before its model was made. A step has two micro-batches. The ratio
of times is the median of the rounds' ratios. Counts are those of the first round; a recorder that
saw only the package's own traffic counts fleet's as none.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Settings, the tool that makes the data, and the file of it.
MODELS = {
    "language": ("configs/quickstart/digits.yaml", "make_digits_dataset.py", "train.jsonl"),
    "policy": ("configs/pi07/tiny_cpu.yaml", "make_demonstrations.py", "arm-joint.jsonl"),
}
TOPOLOGIES = {
    "dp2": {"dp_degree": 2},
    "mp2": {"mp_degree": 2},
    "mp2 sp": {"mp_degree": 2, "sequence_parallel": True},
    "pp2": {"pp_degree": 2},
    "sharding2": {"sharding_degree": 2},
    "sharding2 stage 2": {"sharding_degree": 2, "sharding_stage": 2},
    "sharding2 stage 3": {"sharding_degree": 2, "sharding_stage": 3},
    "dp2 mp2": {"dp_degree": 2, "mp_degree": 2},
    "dp2 pp2": {"dp_degree": 2, "pp_degree": 2},
    "mp2 pp2": {"mp_degree": 2, "pp_degree": 2},
    "mp2 sharding2": {"mp_degree": 2, "sharding_degree": 2},
}
# Policies run their layers under mp without sequence parallelism.
NOT_OF_POLICIES = ("mp2 sp",)
SAMPLES, MICRO_BATCHES, WARM_UP = 8, 2, 3


def measure(options: argparse.Namespace) -> dict[str, float]:
    """One process of a run: of its own."""
    import paddle_vl
    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.config.load import load_run_config
    from paddle_vl.parallel.recorder import record_collectives
    from paddle_vl.train.build import build_trainer

    if Path(paddle_vl.__file__).resolve().parents[1] != Path(options.package).resolve():
        raise SystemExit(f"paddle_vl comes from {paddle_vl.__file__}, not {options.package}")
    configure_cpu_runtime(1)
    before = _resident("VmRSS")
    trainer = build_trainer(load_run_config(options.config, options.settings))
    trainer.output_dir.mkdir(parents=True, exist_ok=True)
    trainer.reporter.open(0, trainer.num_steps)
    for _ in range(WARM_UP):
        trainer.turn()
    with record_collectives() as recording:
        trainer.turn()
    times = []
    for _ in range(options.steps):
        trainer.processes.wait()
        begin = time.perf_counter()
        trainer.turn()
        trainer.processes.wait()
        times.append(time.perf_counter() - begin)
    trainer.feed.close()
    trainer.reporter.close()
    return {
        # What else the machine does only adds to a step.
        "milliseconds": 1e3 * min(times),
        "collectives": sum(not call.is_message for call in recording.calls),
        "messages": sum(call.is_message for call in recording.calls),
        "bytes": sum(call.num_bytes for call in recording.calls),
        "mib": (_resident("VmHWM") - before) / 2**20,
    }


def _resident(name: str) -> int:
    """Bytes of this process's memory: now (VmRSS), the most so far (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {name}")


def run(model: str, degrees: dict[str, Any], package: Path, work: Path, steps: int) -> dict:
    """Train with the package of a checkout; the most of each number among the processes.

    Raises:
        RuntimeError: the run failed; has the end of its output.
    """
    config, _, data = MODELS[model]
    num_processes = 1
    for name, degree in degrees.items():
        num_processes *= degree if name.endswith("_degree") else 1
    data_size = degrees.get("dp_degree", 1) * degrees.get("sharding_degree", 1)
    settings = {
        "train.output_dir": work / "out",
        "data.train": f"[{work.parent / model / data}]",
        "data.eval": "[]",
        "data.processor": work.parent / model / "processor",
        "train.per_device_train_batch_size": SAMPLES // data_size,
        "train.gradient_accumulation_steps": MICRO_BATCHES,
        "train.max_steps": 10**6,
        "train.eval_steps": "null",
        "train.save_steps": "null",
        "train.resume_from_checkpoint": "none",
        "logging.logging_steps": 10**6,
        "logging.progress_bar": "false",
    } | {f"parallel.{name}": str(degree).lower() for name, degree in degrees.items()}
    if degrees.get("sequence_parallel"):
        settings["data.pad_to_multiple_of"] = degrees["mp_degree"]
    work.mkdir()
    command = [sys.executable, "-m", "paddle.distributed.launch"]
    command += ["--nproc_per_node", str(num_processes), "--log_dir", str(work / "log")]
    command += [__file__, "--worker", str(work), "--package", str(package), "--steps", str(steps)]
    command += ["--config", str(package / config), "--settings"]
    command += [f"{name}={value}" for name, value in settings.items()]
    environment = {name: value for name, value in os.environ.items() if name[:7] != "PADDLE_"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(package)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=work)
    results = sorted(work.glob("result*.json"))
    if done.returncode or len(results) != num_processes:
        logs = sorted((work / "log").glob("workerlog.*"))
        raise RuntimeError((logs[0].read_text() if logs else done.stdout + done.stderr)[-3000:])
    found = [json.loads(path.read_text()) for path in results]
    shutil.rmtree(work)
    return {name: max(each[name] for each in found) for name in found[0]}


def compare(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Lines of the table, as they are found."""
    sides = {"": ROOT} if options.against is None else {"here": ROOT, "there": options.against}
    width = max(map(len, TOPOLOGIES))
    yield (
        f"{'model':8}  {'topology':{width}}  {'checkout':8}  ms/step  collectives  messages  "
        "MB sent  peak MiB"
    )
    for model in options.models:
        _write_data(model, folder / model)
        for topology in options.topologies:
            if model == "policy" and topology in NOT_OF_POLICIES:
                continue
            rounds: list[dict[str, dict]] = []
            for number in range(options.rounds):
                names = list(sides) if number % 2 == 0 else list(sides)[::-1]
                found = {}
                for name in names:
                    work = folder / "work"
                    degrees = TOPOLOGIES[topology]
                    found[name] = run(model, degrees, sides[name], work, options.steps)
                rounds.append(found)
            yield from _rows(model, f"{topology:{width}}", rounds)


def _rows(model: str, topology: str, rounds: Sequence[dict[str, dict]]) -> Iterator[str]:
    first = rounds[0]
    for name in sorted(first):
        times = statistics.median(found[name]["milliseconds"] for found in rounds)
        memory = statistics.median(found[name]["mib"] for found in rounds)
        one = first[name]
        yield (
            f"{model:8}  {topology}  {name:8}  {times:7.1f}  {one['collectives']:11d}  "
            f"{one['messages']:8d}  {one['bytes'] / 1e6:7.2f}  {memory:8.0f}"
        )
    if len(first) > 1:
        ratios = {
            key: statistics.median(
                found["here"][key] / found["there"][key] if found["there"][key] else float("nan")
                for found in rounds
            )
            for key in ("milliseconds", "collectives", "messages", "bytes", "mib")
        }
        yield (
            f"{model:8}  {topology}  {'ratio':8}  {ratios['milliseconds']:7.3f}  "
            f"{ratios['collectives']:11.2f}  {ratios['messages']:8.2f}  {ratios['bytes']:7.2f}  "
            f"{ratios['mib']:8.2f}"
        )


def _write_data(model: str, folder: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / MODELS[model][1]), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--topologies", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES), metavar="NAME",
        help=f"of {', '.join(TOPOLOGIES)} (default all)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=10, help="timed in a run (default 10)")
    parser.add_argument("--rounds", type=int, default=3, help="of all checkouts (default 3)")
    for name in ("--worker", "--package", "--config"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--settings", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        found = measure(options)
        rank = os.environ["PADDLE_TRAINER_ID"]
        (Path(options.worker) / f"result{rank}.json").write_text(json.dumps(found))
        # See paddle_vl.cli.main.run.
        os._exit(0)
    if options.against is not None:
        options.against = options.against.resolve()
        if not (options.against / "paddle_vl" / "__init__.py").is_file():
            parser.error(f"--against: {options.against} is no checkout: it has no paddle_vl/")
    if options.steps < 1 or options.rounds < 1:
        parser.error("--steps and --rounds are numbers from 1")
    with tempfile.TemporaryDirectory() as folder:
        try:
            for line in compare(options, Path(folder)):
                print(line, flush=True)
        except RuntimeError as error:
            print(f"bench_topologies: a run failed:\n{error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
