"""How long a checkpoint blocks training, how long its write takes, and how fast it is verified.

    python tools/benchmarks/checkpoint.py                       # 400 MB of weights, 1.2 GB in all
    python tools/benchmarks/checkpoint.py --size-mb 100 --folder /mnt/shared
    python tools/benchmarks/checkpoint.py --ranks 1 2 4 8 --size-mb 32

Trains square matrices on random rows, with a checkpoint every few steps as a run writes it: weights
and two moments per weight, checksums, fsync. Per checkpoint it reports the seconds that training
was blocked (the copy to host memory), the seconds of the asynchronous write, and their ratio; then
the same without a thread, and the verification of the last checkpoint from disk and from memory.

The first save allocates the host memory and is not reported. A write has to end before the next
save begins; unless `--steps-between` is given, steps go on until the write has ended. Exits
with 1 if training was blocked for more than --limit of a write.

With `--ranks` instead the same per number of ranks with sharding stage 2: bytes that a rank copies
to host memory, the wait of a step, bytes that it reads to verify, and seconds to load the state;
then the bytes that it reads of the weights with sharding stage 3, and as many ranks along mp, of
whose linears one half is divided by columns and the other by rows. Bytes hold on any machine; exits
with 1 if a rank copies more than 1/N and one tensor, or reads more than 1/N of the weights.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import paddle
from paddle import nn

from harness import Result, Table, add_count, launch, parser, run
from paddle_vl.checkpoint.manifest import Manifest, damaged_files, shared_out
from paddle_vl.checkpoint.reading import Materializable, checkpoint_tensors, stored_values
from paddle_vl.checkpoint.rules import LinearWeights, StoredParameter
from paddle_vl.checkpoint.safetensors_io import FileWriter, StoredTensor
from paddle_vl.checkpoint.writing import parameters_to_write, write_tensors
from paddle_vl.compat import configure_cpu_runtime
from paddle_vl.config.schema import TrainConfig
from paddle_vl.nn.master_weights import MasterWeights, ParameterStore
from paddle_vl.nn.parameter_table import ParameterTable, ParamSpec
from paddle_vl.parallel.collectives import gathered_rows
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.ranks import ONE_RANK, FleetRanks
from paddle_vl.parallel.sharding import Sharding
from paddle_vl.parallel.tensor import FleetCheckpointRanks
from paddle_vl.parallel.topology import Topology, initialize
from paddle_vl.train import checkpoint as checkpoints
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.saving.checkpoint_writer import CheckpointWriter

WIDTH = 2048
# With --ranks: many small tensors.
WIDTH_ON_RANKS = 512
ROWS = 64
SHARD_BYTES = 5_000_000_000


class Training:
    """A stack of linears and its optimizer."""

    def __init__(
        self,
        size_mb: int,
        config: TrainConfig,
        width: int = WIDTH,
        topology: Topology | None = None,
    ):
        self.width, count = width, max(1, round(size_mb * 1e6 / (4 * width**2)))
        self.layers = nn.LayerList([nn.Linear(width, width, bias_attr=False) for _ in range(count)])
        named = [(f"layers.{i}.weight", layer.weight) for i, layer in enumerate(self.layers)]
        table = ParameterTable()
        table.add(weight for _, weight in named)
        self.ranks = None
        self.store: ParameterStore = MasterWeights([weight for _, weight in named])
        if topology is not None and topology.world_size > 1:
            self.ranks = FleetCheckpointRanks.of(topology)
            weights = [weight for _, weight in named]
            self.store = Sharding(weights, topology.sharding_group, 2, [list(self.layers)])
        names = {name for name, _ in named}
        self.optimizer = Optimizer(named, config, names, self.store, table, names)
        self.stored = [StoredParameter(name, w, LinearWeights(), table) for name, w in named]

    def step(self) -> None:
        """One update."""
        rows = paddle.randn([ROWS, self.width])
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
        write_tensors(folder, "model", tensors, SHARD_BYTES, self.ranks, write)
        states, stem = self.optimizer.state_to_write(), checkpoints.OPTIMIZER_STEM
        write_tensors(folder, stem, states, SHARD_BYTES, self.ranks, write)


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


def on_rank(folder: str, size_mb: int, num_ranks: int) -> dict[str, float]:
    """What a checkpoint costs one of some ranks."""
    stage = 2 if num_ranks > 1 else 1
    topology = initialize(ParallelDegrees(sharding_degree=num_ranks, sharding_stage=stage))
    config = TrainConfig(output_dir=folder, max_steps=1, save_total_limit=None)
    training = Training(size_mb, config, WIDTH_ON_RANKS, topology)
    training.step()
    ranks = FleetRanks(topology) if num_ranks > 1 else ONE_RANK
    with CheckpointWriter(Path(folder), config, ranks) as writer:
        # The first one allocates the memory.
        for step in (1, 2):
            begin = time.perf_counter()
            target = writer.save(step, training.fill)
            stall_s = time.perf_counter() - begin
            on_host = sum(copy.nbytes for copy in writer._memory.values())
            writer.wait()
    manifest = Manifest.read(target)
    assert manifest is not None
    own = shared_out(manifest.files, ranks.rank, num_ranks)
    verified = sum(piece.length for file in own.values() for piece in file.parts())
    begin = time.perf_counter()
    training.optimizer.load_state(checkpoints.StoredArrays(target))
    load_s = time.perf_counter() - begin
    size = sum(file.size for file in manifest.files.values())
    of_weights = sum(tensor.num_bytes for tensor in checkpoint_tensors(target).values())
    found = {"bytes": size, "on_host": on_host, "verified": verified, "weights": of_weights}
    found |= {"stall_s": stall_s, "load_s": load_s, "sharding": bytes_read(target, topology)}
    if num_ranks > 1:
        topology = initialize(ParallelDegrees(mp_degree=num_ranks))
    return found | {"mp": bytes_read(target, topology)}


class Linears(Materializable):
    """Linears whose values come from a checkpoint, divided over mp ranks."""

    def __init__(self, folder: Path, topology: Topology):
        super().__init__()
        stored, size = checkpoint_tensors(folder), topology.mp_group.nranks
        table = ParameterTable(topology.mp_group if size > 1 else None)
        table.readers, table.gather_rows = topology.readers, gathered_rows
        items = []
        for number, (name, tensor) in enumerate(stored.items()):
            shape, axis = list(tensor.shape[::-1]), 1 - number % 2
            if size > 1:
                shape[axis] //= size
            with paddle.LazyGuard():
                weight = self.create_parameter(shape)
            self.add_parameter(str(number), weight)
            table.add([weight], ParamSpec(axis if size > 1 else None))
            items.append(StoredParameter(name, weight, LinearWeights(), table))
        self.materialize_later(lambda: stored_values(items, stored))


def bytes_read(folder: Path, topology: Topology) -> int:
    """Bytes that this rank reads of the weights."""
    counted, plain = [], StoredTensor.read

    def read(tensor: StoredTensor, **options: Any):
        counted.append(tensor.num_bytes)
        return plain(tensor, **options)

    with patch.object(StoredTensor, "read", read):
        model = Linears(folder, topology)
        if topology.sharding_group.nranks > 1:
            Sharding(model.materialize(), topology.sharding_group, 3, [[model]])
        else:
            model.materialize_all()
    return sum(counted)


def over_ranks(options: argparse.Namespace, work: Path) -> Result:
    """A row per number of ranks, of the rank with the most of each."""
    rows, result, is_good = [], {}, True
    for count in options.ranks:
        with tempfile.TemporaryDirectory(dir=options.folder or work) as folder:
            given = {"folder": folder, "size_mb": options.size_mb, "num_ranks": count}
            found = launch(on_rank, work / "ranks", count, **given)
        most = {name: max(rank[name] for rank in found) for name in found[0]}
        result[str(count)] = most
        is_good &= most["on_host"] <= most["bytes"] / count + 4 * WIDTH_ON_RANKS**2
        is_good &= max(most["sharding"], most["mp"]) <= most["weights"] / count
        sizes = [
            f"{most[name] / 1e6:.1f}"
            for name in ("bytes", "on_host", "verified", "weights", "sharding", "mp")
        ]
        rows.append([str(count), *sizes, f"{most['stall_s']:.3f}", f"{most['load_s']:.3f}"])
    columns = [
        "ranks", "MB of files", "MB to the host", "MB verified", "MB of weights",
        "MB read, sharding 3", "MB read, mp", "stall s", "load s",
    ]  # fmt: skip
    return Result([Table("checkpoint", columns, rows, "")], result, is_good=is_good)


def compare(options: argparse.Namespace, work: Path) -> Result:
    if options.ranks:
        return over_ranks(options, work)
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
    made.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks, for bytes per rank")
    made.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    made.add_argument("--limit", type=float, default=0.1, help="of stall to write (0.1)")
    sys.exit(run(made, compare))
