"""How long a checkpoint blocks training, how long its write takes, and how fast it is verified.

    python tools/benchmarks/checkpoint.py                       # 400 MB of weights, 1.2 GB in all
    python tools/benchmarks/checkpoint.py --size-mb 100 --folder /mnt/shared

Trains square matrices on random rows, with a checkpoint every few steps as a run writes it: weights
and two moments per weight, checksums, fsync. Per checkpoint it reports the seconds that training
was blocked (the copy to host memory), the seconds of the asynchronous write, and their ratio; then
the same without a thread, and the verification of the last checkpoint from disk and from memory.

The first save allocates the host memory and is not reported. A write has to end before the next
save begins; unless `--steps-between` is given, steps go on until the write has ended. Exits
with 1 if training was blocked for more than --limit of a write.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import paddle
from paddle import nn

from harness import Result, Table, add_count, parser, run
from paddle_vl.checkpoint.manifest import Manifest, damaged_files
from paddle_vl.checkpoint.rules import LinearWeights, StoredParameter
from paddle_vl.checkpoint.safetensors_io import FileWriter
from paddle_vl.checkpoint.writing import parameters_to_write, write_tensors
from paddle_vl.compat import configure_cpu_runtime
from paddle_vl.config.schema import TrainConfig
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.nn.parameter_table import ParameterTable
from paddle_vl.train import checkpoint as checkpoints
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.saving.checkpoint_writer import CheckpointWriter

WIDTH = 2048
ROWS = 64
SHARD_BYTES = 5_000_000_000


class Training:
    """A stack of linears and its optimizer."""

    def __init__(self, size_mb: int, config: TrainConfig):
        count = max(1, round(size_mb * 1e6 / (4 * WIDTH**2)))
        self.layers = nn.LayerList([nn.Linear(WIDTH, WIDTH, bias_attr=False) for _ in range(count)])
        named = [(f"layers.{i}.weight", layer.weight) for i, layer in enumerate(self.layers)]
        table = ParameterTable()
        table.add(weight for _, weight in named)
        self.store = MasterWeights([weight for _, weight in named])
        names = {name for name, _ in named}
        self.optimizer = Optimizer(named, config, names, self.store, table, names)
        self.stored = [StoredParameter(name, w, LinearWeights(), table) for name, w in named]

    def step(self) -> None:
        """One update."""
        rows = paddle.randn([ROWS, WIDTH])
        for layer in self.layers:
            rows = paddle.tanh(layer(rows))
        rows.square().mean().backward()
        self.store.end_micro_batch()
        self.store.end_backward()
        self.optimizer.step(1e-4)
        self.store.all_gather_parameters()
        self.optimizer.clear_gradients()

    def fill(self, folder: Path, write: FileWriter) -> None:
        """Write what a checkpoint consists of."""
        tensors = parameters_to_write(self.stored, store=self.store)
        write_tensors(folder, "model", tensors, SHARD_BYTES, None, write)
        states, stem = self.optimizer.state_to_write(), checkpoints.OPTIMIZER_STEM
        write_tensors(folder, stem, states, SHARD_BYTES, None, write)


def saved(training: Training, config: TrainConfig, folder: Path, saves: int, between: int | None):
    """Times of each checkpoint, and the folder of the last one."""
    times, step = [], 0
    with CheckpointWriter(folder, config) as writer:
        for _ in range(1 + saves):
            begin = time.perf_counter()
            target = writer.save(step, training.fill)
            returned, ended, steps = time.perf_counter(), None, 0
            while steps < (between or 1) or (between is None and ended is None):
                training.step()
                writer.poll()
                steps, step = steps + 1, step + 1
                if ended is None and target.exists():
                    ended = time.perf_counter()
            writer.wait()
            write_s = (ended or time.perf_counter()) - returned
            times.append({"stall_s": returned - begin, "write_s": write_s, "steps": steps})
    return times[1:], target


def compare(options: argparse.Namespace, work: Path) -> Result:
    configure_cpu_runtime(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(dir=options.folder or work) as name:
        settings = {"output_dir": name, "max_steps": 1, "save_total_limit": None}
        config = TrainConfig(**settings)
        training = Training(options.size_mb, config)
        training.step()
        args = (options.saves, options.steps_between)
        asynchronous, target = saved(training, config, Path(name) / "asynchronous", *args)
        synchronous, _ = saved(
            training, TrainConfig(**settings, async_save=False), Path(name) / "synchronous", 1, 1
        )
        result = {"asynchronous": asynchronous, "synchronous": synchronous, **verification(target)}
    for times in asynchronous:
        times["ratio"] = times["stall_s"] / times["write_s"]
    is_good = max(times["ratio"] for times in asynchronous) <= options.limit
    return Result([table(result)], result, is_good=is_good)


def verification(folder: Path) -> dict[str, float]:
    """Bytes of a checkpoint, and GB verified per second."""
    manifest = Manifest.read(folder)
    assert manifest is not None
    size = sum(file.size for file in manifest.files.values())
    rates: dict[str, float] = {"bytes": size}
    for name, drop_cache in (("disk", True), ("memory", False)):
        begin = time.perf_counter()
        assert not damaged_files(folder, manifest.files, drop_cache=drop_cache)
        rates[f"verified_from_{name}_gb_per_s"] = size / 1e9 / (time.perf_counter() - begin)
    return rates


def table(result: dict[str, Any]) -> Table:
    """A row per checkpoint, then one without a thread."""
    rows = [
        [
            "asynchronous" if number else "asynchronous, first",
            f"{times['stall_s']:.3f}",
            f"{times['write_s']:.3f}",
            f"{times['ratio']:.1%}",
            str(times["steps"]),
        ]
        for number, times in enumerate(result["asynchronous"])
    ]
    rows.append(["synchronous", f"{result['synchronous'][0]['stall_s']:.3f}", "", "", ""])
    rates = [f"{result[f'verified_from_{name}_gb_per_s']:.2f}" for name in ("disk", "memory")]
    note = (
        f"Checkpoint of {result['bytes'] / 1e9:.2f} GB. Verification reads {rates[0]} GB/s from "
        f"disk and {rates[1]} GB/s from memory."
    )
    columns = ["checkpoint", "stall s", "write s", "ratio", "steps during the write"]
    return Table("checkpoint", columns, rows, note)


if __name__ == "__main__":
    made = parser(__doc__)
    add_count(made, "size-mb", 400, "weights, in MB")
    add_count(made, "saves", 4, "checkpoints")
    add_count(made, "steps-between", None, "steps between two of them")
    made.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    made.add_argument("--limit", type=float, default=0.1, help="of stall to write (0.1)")
    sys.exit(run(made, compare))
