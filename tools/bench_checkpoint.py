"""How long training stands still for a checkpoint, how long its write takes, and its verification.

    python tools/bench_checkpoint.py                       # 400 MB of weights, 1.2 GB in all
    python tools/bench_checkpoint.py --size-mb 100 --folder /mnt/shared

Trains a model of square matrices on random rows, with a checkpoint every few steps, as a run writes
it: weights and two moments per weight, checksums, on the disk before it counts (fsync). For every
checkpoint it prints the seconds that training stood still (the copy to host memory), the seconds of
the write beside training, and their ratio; then the same without a thread. At the end it verifies
the last checkpoint, from the disk and from memory, and prints GB/s.

The copy's memory is made ready beside the first steps, for which this waits. The write that is in
flight has to end before the next save begins, so steps between two saves have to take longer than
the write: `--steps-between` is chosen so unless given. Exits with 1 where the stall of a checkpoint
is above --limit of its write.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import paddle
from paddle import nn

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
# A run trains for minutes before its first checkpoint.
WARM_UP_S = 10.0


class Training:
    """A stack of linears and its optimizer."""

    def __init__(self, size_mb: int, config: TrainConfig):
        count = max(1, round(size_mb * 1e6 / (4 * WIDTH**2)))
        self.layers = nn.LayerList([nn.Linear(WIDTH, WIDTH, bias_attr=False) for _ in range(count)])
        named = [(f"layers.{i}.weight", layer.weight) for i, layer in enumerate(self.layers)]
        table = ParameterTable()
        table.add(weight for _, weight in named)
        store = MasterWeights([weight for _, weight in named])
        names = {name for name, _ in named}
        self.optimizer = Optimizer(named, config, names, store, table, names)
        self.stored = [StoredParameter(name, w, LinearWeights(), table) for name, w in named]

    def step(self) -> None:
        """One update."""
        rows = paddle.randn([ROWS, WIDTH])
        for layer in self.layers:
            rows = paddle.tanh(layer(rows))
        rows.square().mean().backward()
        self.optimizer.step(1e-4)
        self.optimizer.clear_gradients()

    def fill(self, folder: Path, write: FileWriter) -> None:
        """What a checkpoint consists of."""
        tensors = parameters_to_write(self.stored)
        write_tensors(folder, "model", tensors, SHARD_BYTES, write=write)
        states = self.optimizer.state_to_write()
        write_tensors(folder, checkpoints.OPTIMIZER_STEM, states, SHARD_BYTES, write=write)


def saved(training: Training, config: TrainConfig, folder: Path, saves: int, between: int | None):
    """Times of each of so many checkpoints, and the last one's folder."""
    times, step = [], 0
    with CheckpointWriter(folder, config) as writer:
        writer.prepare(training.optimizer.bytes_to_write())
        for _ in range(2):
            training.step()
        time.sleep(WARM_UP_S if config.async_save else 0)
        for _ in range(saves):
            begin = time.perf_counter()
            target = writer.save(step, training.fill)
            called = time.perf_counter() - begin
            steps = 0
            while steps < (between or 1) or (between is None and not target.exists()):
                training.step()
                writer.poll()
                steps, step = steps + 1, step + 1
            writer.wait()
            stall = writer.times.stall if config.async_save else called
            times.append({"stall_s": stall, "write_s": writer.times.write, "steps_beside": steps})
    return times, target


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-mb", type=int, default=400, help="weights, in MB (default 400)")
    parser.add_argument("--saves", type=int, default=4, help="checkpoints (default 4)")
    parser.add_argument("--steps-between", type=int, help="steps between two of them")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--limit", type=float, default=0.1, help="of stall to write (default 0.1)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    configure_cpu_runtime(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        settings = {"output_dir": name, "max_steps": 1, "save_total_limit": None}
        config = TrainConfig(**settings)
        training = Training(options.size_mb, config)
        training.step()
        args = (options.saves, options.steps_between)
        beside, target = saved(training, config, Path(name) / "beside", *args)
        plain, _ = saved(
            training, TrainConfig(**settings, async_save=False), Path(name) / "plain", 1, 1
        )
        result = {"beside": beside, "plain": plain, **verification(target)}
    for times in beside:
        times["ratio"] = times["stall_s"] / times["write_s"]
    if options.json:
        print(json.dumps(result))
    else:
        print_result(result)
    return int(max(times["ratio"] for times in beside) > options.limit)


def verification(folder: Path) -> dict[str, float]:
    """Bytes of a checkpoint, and how many of them are verified per second."""
    manifest = Manifest.read(folder)
    size = sum(file.size for file in manifest.files.values())
    rates = {"bytes": size}
    for name, drop_cache in (("disk", True), ("memory", False)):
        begin = time.perf_counter()
        assert not damaged_files(folder, manifest.files, drop_cache=drop_cache)
        rates[f"verified_from_{name}_gb_per_s"] = size / 1e9 / (time.perf_counter() - begin)
    return rates


def print_result(result: dict) -> None:
    """The figures as a table."""
    print(f"checkpoint of {result['bytes'] / 1e9:.2f} GB")
    print(f"{'':<18}{'stall s':>9}{'write s':>9}{'ratio':>8}{'steps beside':>14}")
    for number, times in enumerate(result["beside"]):
        name = "beside training" if number else "  the first"
        print(
            f"{name:<18}{times['stall_s']:>9.3f}{times['write_s']:>9.3f}{times['ratio']:>8.1%}"
            f"{times['steps_beside']:>14}"
        )
    print(f"{'without a thread':<18}{result['plain'][0]['stall_s']:>9.3f}")
    for source in ("disk", "memory"):
        rate = result[f"verified_from_{source}_gb_per_s"]
        print(f"verified from {source}: {rate:.2f} GB/s")


if __name__ == "__main__":
    raise SystemExit(main())
