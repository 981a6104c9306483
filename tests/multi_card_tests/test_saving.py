"""Checkpoints of several ranks, written in the background while training continues.

Guarantees: ranks that share the writing produce one complete checkpoint, equal to the one that a
single rank writes, also where the file system has no writes of several ranks into one file; they
issue their own collectives meanwhile; a rank that cannot write fails the save on all ranks, with
snapshots and without, and earlier checkpoints stay; each of N ranks reads 1/N of a large weight and
has its shard bit for bit, whatever the shard; damage that one rank reads is reported on every
rank, and so is a range that no rank has written.
"""

import errno
from functools import partial
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_vl.checkpoint import writing
from paddle_vl.checkpoint.manifest import Manifest, SummedStream, damaged_files
from paddle_vl.checkpoint.ranges import ShardedValue
from paddle_vl.checkpoint.reading import stored_value
from paddle_vl.checkpoint.rules import LinearWeights, StoredParameter
from paddle_vl.checkpoint.safetensors_io import (
    StoredTensor,
    TensorToWrite,
    encoded,
    read_checkpoint_headers,
    read_header,
    write_file,
)
from paddle_vl.nn.parameter_table import ParameterTable, ParamSpec
from paddle_vl.parallel.collectives import gathered_rows
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.ranks import FleetRanks
from paddle_vl.parallel.tensor import FleetCheckpointRanks
from paddle_vl.parallel.topology import initialize
from paddle_vl.train.resume import examine
from paddle_vl.train.saving import commit
from paddle_vl.train.saving.checkpoint_writer import CheckpointWriter
from tests.single_card_tests.train.saved import filled, settings, steps_in
from tests.support.launch import launch, outcome_of, run_checks

RANKS = 2
ROWS, COUNT = 1024, 6
# As in a file, `[out, in]`.
WEIGHT = np.random.default_rng(0).normal(size=(1024, 512)).astype(np.float32)
NAMES = ("together", "reading", "without_a_thread", "without_writes_in_place", "damage", "hole")


def whole(number: int) -> np.ndarray:
    return np.arange(ROWS, dtype=np.float32) + number


def halves(group) -> list[tuple[paddle.Tensor, TensorToWrite]]:
    """Tensors of which every rank has half."""
    table, tensors = ParameterTable(group), []
    for number in range(COUNT):
        own = paddle.to_tensor(np.split(whole(number), RANKS)[group.rank])
        table.add([own], ParamSpec(split_axis=0))
        source = ShardedValue(table, own, None)
        tensor = TensorToWrite(f"t{number}", (ROWS,), "F32", own.numpy, source=source)
        tensors.append((own, tensor))
    return tensors


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class Checks:
    """Checks of two ranks that save one model into a shared folder."""

    def __init__(self, folder: str):
        self.topology = topology = initialize(ParallelDegrees(mp_degree=RANKS))
        self.folder, self.ranks = Path(folder), FleetRanks(topology)
        self.checkpoint_ranks, self.group = FleetCheckpointRanks.of(topology), topology.mp_group

    def fill(self, folder, write) -> None:
        if self.ranks.is_main:
            filled(2)(folder, lambda *arguments: None)
        for stem in ("model", "optimizer"):
            held = halves(self.group)
            tensors, limit = [tensor for _, tensor in held], 4 * ROWS * 2
            writing.write_tensors(folder, stem, tensors, limit, self.checkpoint_ranks, write)

    def save(self, name: str, **changes) -> Path:
        with CheckpointWriter(self.folder / name, settings(**changes), self.ranks) as writer:
            folder = writer.save(2, self.fill)
            for _ in range(20):
                # Collectives of the main threads, in the same order on all ranks.
                assert self.ranks.totals([1]) == [1]
                writer.poll()
        return folder

    def together(self) -> None:
        folder = self.save("together", save_total_limit=1)
        for stem in ("model", "optimizer"):
            assert len(list(folder.glob(f"{stem}-*-of-*.safetensors"))) > 1
            stored = read_checkpoint_headers(folder, stem)
            for number in range(COUNT):
                np.testing.assert_array_equal(stored[f"t{number}"].read(), whole(number))
        files = Manifest.read(folder).files
        assert sorted(contents(folder)) == sorted(
            [*(name for name in files if "/" not in name), "manifest.json"]
        )
        assert not examine(folder, True, self.ranks).problems

    def without_a_thread(self) -> None:
        one, other = self.save("beside"), self.save("plain", async_save=False)
        assert contents(one) == contents(other)

    def without_writes_in_place(self) -> None:
        wanted = contents(self.save("in_place"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CheckpointWriter, "_writes_in_place", lambda *_: False)
            found = self.save("apart", save_total_limit=1)
        manifest = Manifest.read(found)
        assert contents(found) == wanted
        assert not damaged_files(found, manifest.files)

    def reading(self) -> None:
        file, bits = self.folder / f"{self.group.rank}.safetensors", encoded(WEIGHT, "BF16")
        write_file(file, [TensorToWrite("w", bits.shape, "BF16", lambda: bits)])
        stored = read_header(file)
        full, plain = paddle.to_tensor(WEIGHT.T).astype("bfloat16"), StoredTensor.read
        for axis in (None, 0, 1):
            table = ParameterTable(self.group)
            table.readers, table.gather_rows = self.topology.readers, gathered_rows
            own = full if axis is None else full.split(RANKS, axis)[self.group.rank]
            table.add([own], ParamSpec(axis))
            read = []

            def counted(tensor, read=read, **options):
                read.append(tensor.num_bytes)
                return plain(tensor, **options)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(StoredTensor, "read", counted)
                found = stored_value([StoredParameter("w", own, LinearWeights(), table)], stored)
            assert bool((found == own).all())
            assert sum(read) == stored["w"].num_bytes // RANKS, axis

    def hole(self) -> None:
        plain = commit.leave_part

        def incomplete(partial, rank, files, *rest):
            plain(partial, rank, files if rank == 0 else {}, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(commit, "leave_part", incomplete)
            writer = CheckpointWriter(self.folder / "hole", settings(), self.ranks)
            writer.save(2, self.fill)
            with pytest.raises(RuntimeError, match="are of no rank or of two"):
                writer.wait()
            writer.close()
        assert not steps_in(self.folder / "hole")

    def damage(self) -> None:
        folder = self.save("damage")
        file = folder / "model-00002-of-00003.safetensors"
        if self.ranks.is_main:
            file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
        self.ranks.wait()
        (problem,) = examine(folder, True, self.ranks).problems
        assert problem.startswith(file.name)
        assert len(set(self.ranks.gathered(problem))) == 1

    def full_disk(self, async_save: bool = True) -> None:
        name = f"full-{async_save}"
        folder = self.save(name, async_save=async_save)
        self.ranks.wait()
        before = contents(folder)
        plain = SummedStream.to_disk

        def to_disk(stream):
            if self.ranks.rank == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return plain(stream)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SummedStream, "to_disk", to_disk)
            train = settings(async_save=async_save)
            writer = CheckpointWriter(self.folder / name, train, self.ranks)

            def save() -> None:
                writer.save(4, self.fill)
                writer.wait()

            with pytest.raises(RuntimeError, match="No space left on device") as caught:
                save()
            writer.close()
        assert self.ranks.is_main == ("rank 1" in str(caught.value))
        assert steps_in(self.folder / name) == [2]
        assert contents(folder) == before


def worker(folder: str) -> dict:
    checks = Checks(folder)
    full = {f"full disk {beside}": partial(checks.full_disk, beside) for beside in (True, False)}
    return run_checks({name: getattr(checks, name) for name in NAMES} | full)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return launch(worker, RANKS, arguments=(str(tmp_path_factory.mktemp("saved")),))


@pytest.mark.parametrize("name", [*NAMES, "full disk True", "full disk False"])
def test_ranks_that_save_together(outcomes, name):
    outcome_of(outcomes, name)
