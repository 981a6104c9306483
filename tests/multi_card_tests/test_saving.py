"""Checkpoints of several ranks, written in the background while training continues.

Guarantees: ranks that share the writing produce one complete checkpoint, equal to the one that a
single rank writes; they issue their own collectives meanwhile; a rank that cannot write fails the
save on all ranks, with snapshots and without, and earlier checkpoints stay; damage that one rank
reads is reported on every rank.
"""

import errno
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_vl.checkpoint import writing
from paddle_vl.checkpoint.manifest import Manifest, SummedStream
from paddle_vl.checkpoint.safetensors_io import TensorToWrite, read_checkpoint_headers
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.ranks import FleetRanks
from paddle_vl.parallel.tensor import FleetCheckpointRanks
from paddle_vl.parallel.topology import initialize
from paddle_vl.train.resume import examine
from paddle_vl.train.saving.checkpoint_writer import CheckpointWriter
from tests.single_card_tests.train.saved import filled, settings, steps_in
from tests.support.launch import launch, outcome_of, run_checks

RANKS = 2
ROWS, COUNT = 1024, 6
NAMES = ("together", "without_a_thread", "damage", "full_disk", "full_disk_without_a_thread")


def whole(number: int) -> np.ndarray:
    return np.arange(ROWS, dtype=np.float32) + number


def parts_of(group) -> list[TensorToWrite]:
    """Tensors of which every rank has half, and which all ranks gather together."""

    def produce(number: int) -> np.ndarray:
        parts: list[paddle.Tensor] = []
        own = np.split(whole(number), RANKS)[group.rank]
        dist.all_gather(parts, paddle.to_tensor(own), group=group)
        return np.concatenate([part.numpy() for part in parts])

    return [
        TensorToWrite(f"t{number}", (ROWS,), "F32", lambda number=number: produce(number))
        for number in range(COUNT)
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class Checks:
    """Checks of two ranks that save one model into a shared folder."""

    def __init__(self, folder: str):
        topology = initialize(ParallelDegrees(mp_degree=RANKS))
        self.folder, self.ranks = Path(folder), FleetRanks(topology)
        self.checkpoint_ranks, self.group = FleetCheckpointRanks.of(topology), topology.mp_group

    def fill(self, folder, write) -> None:
        if self.ranks.is_main:
            filled(2)(folder, lambda *arguments: None)
        for stem in ("model", "optimizer"):
            tensors = parts_of(self.group)
            writing.write_tensors(folder, stem, tensors, 1 << 30, self.checkpoint_ranks, write)

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

    def damage(self) -> None:
        folder = self.save("damage")
        file = folder / "model-00002-of-00002.safetensors"
        if self.ranks.is_main:
            file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
        self.ranks.wait()
        (problem,) = examine(folder, True, self.ranks).problems
        assert problem.startswith(file.name)
        assert len(set(self.ranks.gathered(problem))) == 1

    def full_disk(self) -> None:
        self._full_disk(async_save=True)

    def full_disk_without_a_thread(self) -> None:
        self._full_disk(async_save=False)

    def _full_disk(self, async_save: bool) -> None:
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
    writing.MIN_SHARD_BYTES = 4 * ROWS
    checks = Checks(folder)
    return run_checks({name: getattr(checks, name) for name in NAMES})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return launch(worker, RANKS, arguments=(str(tmp_path_factory.mktemp("saved")),))


@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_save_together(outcomes, name):
    outcome_of(outcomes, name)
