"""Model files written by ranks of several stages. What each rank writes: `test_ranges`."""

import weakref
from dataclasses import dataclass

import numpy as np
from safetensors.numpy import load_file

from paddle_vl.checkpoint import writing
from paddle_vl.checkpoint.safetensors_io import (
    TensorToWrite,
    read_checkpoint_headers,
    write_file,
)
from paddle_vl.nn.parameter_table import CheckpointRanks
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


def test_two_stages_of_two_ranks_write_the_files_of_one_rank(tmp_path, monkeypatch):
    """Four tensors of one stage, three of the other; their ranks write in any order."""
    monkeypatch.setattr(Staged, "wait", lambda ranks: None)
    stages = [tensors("a", 4, []), tensors("b", 3, [])]
    plans = tuple([[[t.name, list(t.shape), t.dtype] for t in stage], []] for stage in stages)
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    (several / "model.safetensors").write_bytes(b"old")
    writing.write_tensors(one, "model", [*stages[0], *stages[1]], 3 * KIB)
    written = []
    for stage, number in ((1, 1), (1, 0), (0, 1), (0, 0)):
        produced: list[str] = []
        own = tensors("ab"[stage], len(stages[stage]), produced)
        ranks = Staged(number, 2, stage, plans=plans)
        writing.write_tensors(
            several, "model", own, 3 * KIB, ranks, lambda file, parts: write_file(file, parts)
        )
        written.append(produced)
    assert written == [["b1", "b2"], ["b0"], ["a2", "a3"], ["a0", "a1"]]
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {
        p.name: p.read_bytes() for p in several.iterdir()
    }
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(p.name for p in several.iterdir()) == [*names, "model.safetensors.index.json"]
    for name, tensor in read_checkpoint_headers(several).items():
        np.testing.assert_array_equal(tensor.read(), np.full([256], int(name[1])))


def test_files_of_several_ranks_get_their_names_at_the_end(tmp_path):
    """Without a checkpoint folder of their own, as `save_pretrained` writes."""
    old = tmp_path / "model.safetensors"
    writing.write_tensors(tmp_path, "model", tensors("a", 2, []), 1 << 30)
    held = np.memmap(old)
    before = held.tobytes()
    writing.write_tensors(tmp_path, "model", tensors("b", 2, []), 1 << 30, CheckpointRanks(1, 2))
    assert old.read_bytes() == before
    writing.write_tensors(tmp_path, "model", tensors("b", 2, []), 1 << 30, CheckpointRanks(0, 2))
    assert held.tobytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


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
        writing.write_tensors(folder, "model", own, 1 << 30, write=write)

    with CheckpointWriter(tmp_path, settings()) as writer:
        final = writer.save_final(1, filled(1), fill)
    assert len(alive) == 3
    assert {path.name for path in final.iterdir()} == {"model.safetensors", "manifest.json"}
    assert load_file(final / "model.safetensors").keys() == {"a", "b", "c"}
