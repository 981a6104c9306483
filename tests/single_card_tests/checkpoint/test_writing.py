"""Model files written by several ranks.

Guarantees: every rank writes its own files only; together they hold every tensor once, and the
index names them all; all ranks produce tensors in one order, as their collectives need; a small
model is one file, whichever rank writes it; files of an earlier save are deleted; a final model
that is streamed is one file, and in memory one tensor at a time.
"""

import weakref
from dataclasses import dataclass

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl.checkpoint import writing
from paddle_vl.checkpoint.safetensors_io import TensorToWrite, read_checkpoint_headers
from paddle_vl.nn.placement import CheckpointRanks
from paddle_vl.train.saving.checkpoint_writer import CheckpointWriter
from tests.single_card_tests.train.saved import filled, settings

KIB = 1024


@dataclass(frozen=True)
class Staged(CheckpointRanks):
    """One of two stages with known plans."""

    plans: tuple = ()

    def gather_stages(self, value):
        assert value == self.plans[self.stage]
        return list(self.plans)


def tensors(prefix: str, count: int, produced: list[str]) -> list[TensorToWrite]:
    """Tensors of 1 KiB each."""

    def produce(name: str, number: int) -> np.ndarray:
        produced.append(name)
        return np.full([256], number, np.float32)

    names = [f"{prefix}{number}" for number in range(count)]
    return [
        TensorToWrite(name, (256,), "F32", lambda name=name, number=number: produce(name, number))
        for number, name in enumerate(names)
    ]


@pytest.fixture(autouse=True)
def small_files_are_worth_a_rank(monkeypatch):
    monkeypatch.setattr(writing, "MIN_SHARD_BYTES", KIB)


def test_ranks_write_their_own_files_of_one_checkpoint(tmp_path):
    """Two stages of two ranks; four tensors of one stage, three of the other."""
    stages = {0: tensors("a", 4, []), 1: tensors("b", 3, [])}
    plans = tuple(
        [{t.name: KIB for t in stages[stage][i : i + 2]} for i in range(0, len(stages[stage]), 2)]
        for stage in (0, 1)
    )
    written = {}
    for stage in (1, 0):
        for number in (1, 0):
            before = set(tmp_path.iterdir())
            produced: list[str] = []
            own = tensors("ab"[stage], len(stages[stage]), produced)
            ranks = Staged(number, 2, stage, plans)
            writing.write_tensors(tmp_path, "model", own, 1 << 30, ranks)
            assert produced == [tensor.name for tensor in own]
            written[stage, number] = {p.name for p in set(tmp_path.iterdir()) - before}
    index = {"model.safetensors.index.json"}
    names = [f"model-{i}-of-00004.safetensors" for i in ("00001", "00002", "00003", "00004")]
    assert [written[0, 0] - index, written[0, 1], written[1, 0], written[1, 1]] == [
        {name} for name in names
    ]
    stored = read_checkpoint_headers(tmp_path)
    assert sorted(stored) == ["a0", "a1", "a2", "a3", "b0", "b1", "b2"]
    for name, tensor in stored.items():
        np.testing.assert_array_equal(tensor.read(), np.full([256], int(name[1])))


def test_few_bytes_are_one_file_whoever_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "MIN_SHARD_BYTES", 8 * KIB)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"old")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    for number in (1, 0):
        own = tensors("a", 4, [])
        writing.write_tensors(tmp_path, "model", own, 1 << 30, CheckpointRanks(number, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert len(read_checkpoint_headers(tmp_path)) == 4


def test_no_file_exceeds_the_limit(tmp_path):
    writing.write_tensors(tmp_path, "optimizer", tensors("a", 5, []), 2 * KIB)
    sizes = [len(read.read()) for read in read_checkpoint_headers(tmp_path, "optimizer").values()]
    assert sizes == [256] * 5
    assert len(list(tmp_path.glob("optimizer-*-of-00003.safetensors"))) == 3


def test_a_streamed_final_model_is_one_file_and_in_memory_one_tensor_at_a_time(tmp_path):
    alive: list[weakref.ref] = []

    def produce() -> np.ndarray:
        assert not any(array() is not None for array in alive)
        array = np.arange(KIB, dtype=np.float32)
        alive.append(weakref.ref(array))
        return array

    def fill(folder, write):
        names = ("a", "b", "c")
        own = [TensorToWrite(name, (KIB,), "F32", produce) for name in names]
        writing.write_one_file(folder, "model", own, write=write)

    with CheckpointWriter(tmp_path, settings()) as writer:
        final = writer.save_final(1, filled(1), fill)
    assert len(alive) == 3
    assert {path.name for path in final.iterdir()} == {"model.safetensors", "manifest.json"}
    assert load_file(final / "model.safetensors").keys() == {"a", "b", "c"}
