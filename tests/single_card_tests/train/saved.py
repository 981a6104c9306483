"""Small checkpoints on disk, without a model, written by the checkpoint writer."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.checkpoint.safetensors_io import FileWriter, TensorToWrite, write_file
from paddle_vl.checkpoint.writing import write_tensors
from paddle_vl.config.load import save_run_config
from paddle_vl.config.schema import RunConfig, TrainConfig
from paddle_vl.families.vlm.settings import VLRun
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank
from paddle_vl.train import checkpoint as checkpoints
from paddle_vl.train.saving.checkpoint_writer import CheckpointWriter

ARRAYS = {"a": np.arange(6, dtype=np.float32)}


def settings(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"output_dir": "out", "max_steps": 1, **changes})


def run_config() -> RunConfig:
    return VLRun.model_validate(
        {
            "model": {"config": {}},
            "data": {"train": ["t.jsonl"], "processor": "p"},
            "train": {"output_dir": "out", "max_steps": 1},
        }
    )


def listed(arrays: Mapping[str, np.ndarray]) -> list[TensorToWrite]:
    return [
        TensorToWrite(name, array.shape, "F32", lambda array=array: array)
        for name, array in arrays.items()
    ]


def write_arrays(
    folder: Path, arrays: Mapping[str, np.ndarray], write: FileWriter = write_file
) -> None:
    write_tensors(folder, checkpoints.OPTIMIZER_STEM, listed(arrays), 1 << 30, write=write)


def filled(
    step: int,
    arrays: Mapping[str, np.ndarray] = ARRAYS,
    config: RunConfig | None = None,
) -> Callable[[Path, FileWriter], None]:
    """Function that fills a checkpoint with these arrays as model and as optimizer state."""

    def fill(folder: Path, write: FileWriter) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "parts").mkdir()
        (folder / "parts" / "tokenizer.json").write_text("[]")
        save_run_config(config or run_config(), folder / "config.yaml")
        write_tensors(folder, "model", listed(arrays), 1 << 30, write=write)
        write_arrays(folder, arrays, write)
        state = {"step": step, "nonfinite_updates": 0}
        checkpoints.save_state(folder, state)

    return fill


def save_checkpoint(
    output_dir: Path,
    step: int,
    config: RunConfig | None = None,
    ranks: SingleRank = ONE_RANK,
    **changes: Any,
) -> Path:
    """Write one checkpoint with its own writer."""
    with CheckpointWriter(output_dir, settings(**changes), ranks) as writer:
        return writer.save(step, filled(step, config=config))


class OneOfSeveral(SingleRank):
    """A rank that communicates with others through shared memory."""

    def __init__(self, rank, board, barrier):
        self.rank, self.is_main, self.board, self.barrier = rank, rank == 0, board, barrier
        self.world_size = len(board)

    def gathered(self, value):
        self.board[self.rank] = value
        self.barrier.wait()
        values = list(self.board)
        self.barrier.wait()
        return values

    def wait(self):
        self.barrier.wait()


def on_ranks(number: int, work: Callable[[SingleRank], Any]) -> list[Any]:
    """What `work` returns or raises on each of this many ranks, run as threads."""
    board, barrier = [None] * number, threading.Barrier(number, timeout=10)
    results: list[Any] = [None] * number

    def run(rank: int) -> None:
        try:
            results[rank] = work(OneOfSeveral(rank, board, barrier))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def steps_in(output_dir: Path) -> list[int]:
    return [step for step, _ in checkpoints.checkpoint_folders(output_dir)]


def flip(path: Path, place: int = -1) -> None:
    """Change a bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def without_manifest(folder: Path) -> Path:
    """The checkpoint as an earlier version wrote it."""
    (folder / "manifest.json").unlink()
    step = int(folder.name.rpartition("-")[2])
    (folder / "trainer_state.json").write_text(f'{{"step": {step}}}')
    return folder
