"""Checks with several processes: collectives between ranks, and steps on ranks against one device.

The launcher of `--nproc` starts this package's command on every rank with a job file. Products run
without TF32 there, so that sums in another order are the only difference.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.config.load import load_run_config
from paddle_vl.doctor.check import Machine, Result, check, ok, wrong
from paddle_vl.parallel.bandwidth import Measure, measure_bandwidth
from paddle_vl.parallel.launcher import launch
from paddle_vl.parallel.store.membership import PeerWatch
from paddle_vl.testing import record_device_copies, record_host_reads
from paddle_vl.testing.comparison import Difference, differences
from paddle_vl.testing.tiny_run import TINY_EXPERTS, write_tiny_run
from paddle_vl.train.build import build_trainer
from paddle_vl.train.stop_signals import StopSignals

logger = logging.getLogger(__name__)
# Reads and copies are counted in the last step; the first ones fill caches.
STEPS, _MICRO_SAMPLES = 3, 8
_WAIT_S = 60.0
# That ranks may take to end when they are asked to.
_STOP_S = 3.0
_TF32 = "NVIDIA_TF32_OVERRIDE"
# Relative to the largest entry of a tensor: sums of float32 in another order.
BOUNDS = {"cpu": 1e-5, "gpu": 1e-4}
_METRICS = ("loss", "grad_norm")
ONE_DEVICE = "one device"
# What a rank logs before a run.
_BEGIN = "run: "
# Reads of host memory (messages between hosts, and kernels that only run on a CPU), of the norm
# before an update, and of the numbers of rows of each expert.
_FREE_READS = (
    *("parallel/ranks.py", "parallel/gloo_fleet/", "nn/attention.py", "nn/cpu/", "train/step.py"),
    *("parallel/expert_parallel.py", "nn/gpu/kernels.py"),
)
# On a CPU, where batches are not copied through pinned memory.
_FREE_COPIES = ("parallel/gloo_fleet/", "nn/operations.py", "train/feeding/")


def topologies(num_ranks: int) -> dict[str, dict[str, Any]]:
    """Settings of each topology by name: every axis over all ranks, and three of them mixed."""
    n = num_ranks

    def degrees(**of_axes: int) -> dict[str, Any]:
        return {f"parallel.{axis}_degree": degree for axis, degree in of_axes.items()}

    rows = {"parallel.sequence_parallel": True, "data.pad_to_multiple_of": n}
    found: dict[str, dict[str, Any]] = {
        f"dp{n}": degrees(dp=n),
        f"mp{n} with sequence parallelism": degrees(mp=n) | rows,
        f"sharding{n} stage 3": degrees(sharding=n) | {"parallel.sharding_stage": 3},
        f"dp{n} ep{n}": degrees(dp=n, ep=n),
    }
    # The tiny model has four layers.
    if n <= 4:
        found[f"pp{n}"] = degrees(pp=n)
    if n >= 4:
        found[f"mp2 pp2 dp{n // 4}"] = degrees(mp=2, pp=2, dp=n // 4)
    return found


@check("ranks.bandwidth", limit_s=240.0, is_quick=False)
def bandwidth(machine: Machine) -> Result:
    """Collectives and messages between the devices."""
    if (n := machine.num_ranks) == 1:
        return Result("skipped", "needs two GPUs on this machine, and one is visible")
    # Large enough that latency does not count; gloo on a CPU is a hundred times slower.
    elements = n * ((1 << 24) // n) if machine.device == "gpu" else 1 << 20
    answer = _on_ranks(machine, "bandwidth", n, {"elements": elements})
    if isinstance(answer, Result):
        return answer
    return bandwidth_result([Measure(**entry) for entry in answer[0]])


def bandwidth_result(measures: Sequence[Measure]) -> Result:
    """The result of these measures; wrong values and a link far below the others are findings."""
    table = [
        measure._asdict() | {"ranks": " ".join(map(str, measure.ranks))} for measure in measures
    ]
    if bad := [measure for measure in measures if not measure.is_right]:
        return wrong(
            f"{bad[0].operation} over ranks {list(bad[0].ranks)} gave wrong values",
            "communication is broken: run NCCL's own tests, check the links (nvidia-smi topo -m, "
            "nvidia-smi nvlink -s), ACS/IOMMU settings and NCCL_P2P_DISABLE=1",
            table=table,
        )
    messages = [measure for measure in measures if measure.operation == "message"]
    others = [measure for measure in measures if measure.operation != "message"]
    speeds = [measure.gb_per_s for measure in messages]
    text = ", ".join(f"{measure.operation} {measure.gb_per_s:.2f}" for measure in others)
    text += f", messages {min(speeds):.2f} to {max(speeds):.2f} GB/s"
    slowest = min(messages, key=lambda measure: measure.gb_per_s)
    if len(messages) > 2 and slowest.gb_per_s < float(np.median(speeds)) / 4:
        return wrong(
            f"{text}; from rank {slowest.ranks[0]} to {slowest.ranks[1]} far below the others",
            "one link is slow: check nvidia-smi topo -m, nvlink -s and the slots of the cards",
            table=table,
        )
    return ok(text, table=table)


@check("ranks.topologies", limit_s=240.0, is_quick=False)
def every_topology(machine: Machine) -> Result:
    """Steps on ranks equal one device, without host reads."""
    n = machine.num_ranks
    folder = machine.folder / "topologies"
    write_tiny_run(folder, STEPS, TINY_EXPERTS)
    common = {"folder": str(folder), "micro_batches": 2 if n == 2 else 4}
    bound, table = BOUNDS[machine.device], []
    wanted = {1: {ONE_DEVICE: {}}} | ({n: topologies(n)} if n > 1 else {})
    for num_ranks, runs in wanted.items():
        answers = _on_ranks(machine, "train", num_ranks, common | {"runs": runs})
        if isinstance(answers, Result):
            return answers
        for name in runs:
            worst = run_difference(folder / name, folder / ONE_DEVICE)
            reads, copies = (
                [place for answer in answers for place in answer[name][what]]
                for what in ("host_reads", "device_copies")
            )
            table.append(
                {
                    "topology": name,
                    "error": worst.error,
                    "in": worst.name,
                    "host_reads": len(reads),
                    "device_copies": len(copies),
                    "at": ", ".join(dict.fromkeys([*reads, *copies])),
                }
            )
    return topologies_result(table, bound)


def topologies_result(table: Sequence[Mapping[str, Any]], bound: float) -> Result:
    """The result of each topology's largest difference from one device, and of the places where
    a rank read the device in the last step, or copied to it."""
    worst = max(table, key=lambda row: row["error"])
    if bad := [row for row in table if not row["error"] <= bound]:
        return wrong(
            f"{', '.join(row['topology'] for row in bad)} differ from one device; "
            f"{worst['topology']} by {worst['error']:.2g} of the largest entry in {worst['in']} "
            f"(bound {bound:.0e})",
            "do not train in these topologies here; run ranks.bandwidth, and report this",
            table=table,
        )
    if at := [row for row in table if row["at"]]:
        return wrong(
            f"in a steady step of {at[0]['topology']} the host reads the device "
            f"{at[0]['host_reads']} times and copies to it {at[0]['device_copies']} times, at "
            f"{at[0]['at']}",
            "the host waits for the device there in every step, or holds it up: report it",
            table=table,
        )
    equal = (
        f"{len(table) - 1} topologies equal one device after {STEPS} steps, within "
        f"{worst['error']:.1e} (bound {bound:.0e}); "
    )
    return ok(
        f"{equal if len(table) > 1 else ''}0 host reads beside the norm, 0 copies to the device "
        "beside the batches",
        table=table,
    )


def run_difference(found: Path, wanted: Path) -> Difference:
    """The largest difference of two runs: loss and gradient norm of every step, and every parameter
    and moment."""
    return differences(_values(found), _values(wanted), least=1e-6)[0]


def _values(folder: Path) -> dict[str, np.ndarray]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    values = {name: np.array([step[name] for step in steps]) for name in _METRICS}
    for part in ("model", "optimizer"):
        headers = read_checkpoint_headers(folder / f"checkpoint-{STEPS}", part)
        values |= {name: tensor.read() for name, tensor in headers.items()}
    return values


def _on_ranks(
    machine: Machine, job: str, num_ranks: int, settings: Mapping[str, Any]
) -> list[Any] | Result:
    """Run a job on several ranks; their answers, or the finding that it failed."""
    folder = machine.folder / f"{job}{num_ranks}"
    folder.mkdir()
    file = folder / "job.json"
    content = {"job": job, "num_ranks": num_ranks, **settings}
    file.write_text(json.dumps(content), encoding="utf-8")
    with mock.patch.dict(os.environ, {_TF32: "0"}):
        code = launch(["doctor", "--rank", str(file)], num_ranks, folder / "log", _STOP_S)
    if code == 0:
        files = (folder / f"answer{rank}.json" for rank in range(num_ranks))
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]
    logs = {
        log.name: log.read_text(encoding="utf-8", errors="replace").splitlines()
        for log in sorted((folder / "log").glob("workerlog.*"))
    }
    lines = [line for log in logs.values() for line in log if line.strip()]
    begun = [line.removeprefix(_BEGIN) for line in lines if line.startswith(_BEGIN)]
    return wrong(
        f"{num_ranks} ranks failed with exit code {code} in {(begun or ['the start'])[-1]}: "
        f"{(lines or [''])[-1].strip():.200}",
        "read the logs in --json; with NCCL set NCCL_DEBUG=INFO, and try NCCL_P2P_DISABLE=1",
        logs={name: log[-15:] for name, log in logs.items()},
    )


def run_rank(file: Path) -> int:
    """Do one rank's part of a job; the command of the ranks."""
    job = json.loads(file.read_text(encoding="utf-8"))
    answer: Any = {}
    # As in a run: a rank ends with its launcher.
    with StopSignals() as stop, PeerWatch():
        stop.set_handlers()
        if job["job"] == "bandwidth":
            measures = measure_bandwidth(job["num_ranks"], job["elements"], _WAIT_S)
            answer = [measure._asdict() for measure in measures]
        for name, settings in job.get("runs", {}).items():
            logger.info("%s%s", _BEGIN, name)
            answer[name] = _train(job, name, settings, stop)
    rank = os.environ.get("PADDLE_TRAINER_ID", "0")
    (file.parent / f"answer{rank}.json").write_text(json.dumps(answer), encoding="utf-8")
    return 0


def _train(
    job: Mapping[str, Any], name: str, settings: dict[str, Any], stop: StopSignals
) -> dict[str, list[str]]:
    """Train one run, whose outputs are compared afterwards.

    Returns:
        Places of the package where the last step's host read the device or copied to it, beside
        what every step needs.
    """
    folder = Path(job["folder"])
    parts = settings.get("parallel.dp_degree", 1) * settings.get("parallel.sharding_degree", 1)
    settings = {
        "train.output_dir": str(folder / name),
        "train.per_device_train_batch_size": _MICRO_SAMPLES // parts,
        "train.gradient_accumulation_steps": job["micro_batches"],
        "parallel.timeout_s": _WAIT_S,
    } | settings
    overrides = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    trainer = build_trainer(load_run_config(folder / "run.yaml", overrides))
    train_one_step, places = trainer.train_one_step, {}

    def recorded() -> Any:
        with record_host_reads() as reads, record_device_copies() as copies:
            outcome = train_one_step()
        places["host_reads"] = [place for place in reads if not place.startswith(_FREE_READS)]
        places["device_copies"] = [x for x in copies if not x.startswith(_FREE_COPIES)]
        return outcome

    trainer.train_one_step = recorded
    signal = trainer.run(stop)
    if signal is not None:
        raise RuntimeError(f"the run {name} was stopped by signal {signal}")
    return places
