"""Writing tensors into one file, or into shards that several ranks write at once.

The files are HF's: `model.safetensors`, or `model-00001-of-00004.safetensors` and so on with
`model.safetensors.index.json`, which is the manifest. Every file holds whole tensors. Ranks that
have parts of a tensor put it together, one tensor at a time, and the rank whose file it belongs to
keeps it; so the whole model is never in one process, all ranks write, and the result does not say
how many they were.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from paddle_vl.checkpoint.safetensors_io import FileWriter, TensorToWrite, write_file
from paddle_vl.nn.placement import Writers

# Below it a file is not worth a rank of its own.
MIN_SHARD_BYTES = 1 << 26


def write_tensors(
    folder: Path,
    stem: str,
    tensors: Iterable[TensorToWrite],
    max_shard_bytes: int,
    writers: Writers | None = None,
    write: FileWriter = write_file,
) -> None:
    """Write tensors; all ranks that have parts of them, or others of the same model, call this.

    Files of an earlier save under the same stem that this one does not overwrite are removed.

    Args:
        stem: `model`, or another name in its place.
        tensors: those of this rank's layers, the same on every rank that has these layers.
        max_shard_bytes: the largest file, unless a single tensor is larger.
        write: takes a file's name and tensors. It produces their arrays before it returns.
    """
    writers, tensors = writers or Writers(), list(tensors)
    total = sum(tensor.num_bytes for tensor in tensors)
    share = max(-(-total // writers.size), MIN_SHARD_BYTES)
    shards = _cut(tensors, share, max_shard_bytes)
    sizes = writers.of_stages([{t.name: t.num_bytes for t in shard} for shard in shards])
    every_shard = [shard for shards_of_stage in sizes for shard in shards_of_stage]
    single = f"{stem}.safetensors"
    names = [single]
    if len(every_shard) > 1:
        count = f"{len(every_shard):05d}"
        names = [f"{stem}-{i + 1:05d}-of-{count}.safetensors" for i in range(len(every_shard))]
    first = sum(len(shards_of_stage) for shards_of_stage in sizes[: writers.stage])
    skipped: list[Callable[[], np.ndarray]] = []
    for number, shard in enumerate(shards):
        if number % writers.size == writers.number:
            write(folder / names[first + number], _after(shard, skipped))
            skipped = []
        else:
            skipped += [tensor.produce for tensor in shard]
    for produce in skipped:
        produce()
    if writers.is_first:
        _write_index(folder, single, dict(zip(names, every_shard, strict=True)))
        for stale in {*folder.glob(f"{stem}-*-of-*.safetensors"), folder / single}:
            if stale.name not in names:
                stale.unlink(missing_ok=True)


def _cut(tensors: Sequence[TensorToWrite], enough: int, most: int) -> list[list[TensorToWrite]]:
    """Consecutive tensors for one file after the other, each of `enough` bytes or nearly `most`."""
    shards: list[list[TensorToWrite]] = []
    filled = 0
    for tensor in tensors:
        if not shards or filled >= enough or filled + tensor.num_bytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    return shards


def _after(
    shard: Sequence[TensorToWrite], skipped: Sequence[Callable[[], np.ndarray]]
) -> list[TensorToWrite]:
    """The tensors of a file, before whose first those of the files of other ranks are produced."""

    def produce() -> np.ndarray:
        for other in skipped:
            other()
        return shard[0].produce()

    return [shard[0]._replace(produce=produce), *shard[1:]]


def _write_index(folder: Path, single: str, sizes: dict[str, dict[str, int]]) -> None:
    index_file = folder / f"{single}.index.json"
    if len(sizes) == 1:
        index_file.unlink(missing_ok=True)
        return
    weight_map = {key: name for name, shard in sizes.items() for key in shard}
    total = sum(size for shard in sizes.values() for size in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    index_file.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
