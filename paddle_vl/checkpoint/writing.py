"""Writing of parameters or other tensors into several files, divided over ranks.

The files are HF's: `model.safetensors`, or `model-00001-of-00004.safetensors` and so on with
`model.safetensors.index.json`, with full tensors. They are the same for any number of ranks: each
of N ranks copies to host memory, and writes, 1/N of their bytes, see `paddle_vl.checkpoint.ranges`.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import paddle

from paddle_vl.checkpoint.ranges import Exchange, Part, ShardedValue, divided, units
from paddle_vl.checkpoint.rules import StoredParameter, by_parameter
from paddle_vl.checkpoint.safetensors_io import FileWriter, TensorToWrite, header_of, write_file
from paddle_vl.nn.parameter_table import CheckpointRanks, Saved

if TYPE_CHECKING:
    from paddle_vl.nn.master_weights import ParameterStore

DEFAULT_SHARD_BYTES = 5_000_000_000
# Begins the name of a file until all ranks have written it.
_PARTIAL = ".partial-"
STORED_DTYPES = {
    paddle.float32: "F32",
    paddle.float64: "F64",
    paddle.float16: "F16",
    paddle.bfloat16: "BF16",
}


def parameter_array(item: StoredParameter, store: "ParameterStore | None" = None) -> np.ndarray:
    """The full stored value in the checkpoint's layout, bfloat16 as its bits; collective where the
    parameter is sharded.

    Args:
        store: as for `parameters_to_write`.
    """
    value = None if store is None else store.gathered_value(item.parameter)
    return item.layout.to_stored(item.of_full(item.table.full_value(item.parameter, value)))


def parameters_to_write(
    parameters: Iterable[StoredParameter], prefix: str = "", store: "ParameterStore | None" = None
) -> list[TensorToWrite]:
    """Full values in the checkpoint's layout, under `prefix` and key; tied copies left out.

    Args:
        store: of the model in training; None if every parameter has storage of its own.
    """
    tensors = []
    for items in by_parameter(parameters):
        first = items[0]
        spec = first.table[first.parameter]
        if not spec.joins_saving:
            continue
        dtype = STORED_DTYPES[first.parameter.dtype]
        source = ShardedValue(first.table, first.parameter, store)
        tensors += [
            TensorToWrite(
                prefix + i.key,
                i.stored_shape,
                dtype,
                arrange=i.layout.to_stored,
                is_joined=spec.saved is Saved.JOINED,
                source=source,
                block=i.block,
                keeps_rows=i.layout.row_axis == 0,
            )
            for i in items
        ]
    return tensors


def write_tensors(
    folder: Path,
    stem: str,
    tensors: Iterable[TensorToWrite],
    max_shard_bytes: int,
    ranks: CheckpointRanks | None = None,
    write: FileWriter = write_file,
) -> None:
    """Write tensors; collective over the checkpoint ranks.

    Removes other files of an earlier save under the same stem.

    Args:
        stem: `model`, or another name in its place.
        tensors: tensors of this rank's layers, the same on every rank with these layers. One
            without a source is produced by one of these ranks only.
        max_shard_bytes: size of the largest file, unless a single tensor is larger.
        ranks: None for this rank alone.
        write: writes a file of tensors, or those with an offset into one; it produces their arrays
            in order before it returns.
    """
    ranks, tensors = ranks or CheckpointRanks(), list(tensors)
    own = [tensor for tensor in tensors if not tensor.is_joined]
    parts, of_source = divided(own, ranks.size), {unit[0].name: unit for unit in units(tensors)}
    crossing = [
        [part.tensors[0].name, part.first, part.last, part.writer]
        for part in parts
        if part.crosses_stages
    ]
    stages = ranks.gather_stages([[[t.name, list(t.shape), t.dtype] for t in own], crossing])
    files = _files_of(stem, [head for heads, _ in stages for head in heads], max_shard_bytes)
    # Several ranks write into each file.
    is_shared = ranks.size * len(stages) > 1
    is_direct = is_shared and write is write_file
    if is_direct:
        if ranks.is_first:
            for stale in folder.glob(f"{_PARTIAL}*"):
                stale.unlink()
        ranks.wait()
    places = {t.name: (file, t.offset or 0) for file, (_, held) in files.items() for t in held}
    from_stages = None
    if ranks.of_stages is not None:
        found = [
            Part(of_source[name], first, last, ranks.of_stages.writers[writer])
            for _, of_stage in stages
            for name, first, last, writer in of_stage
        ]
        from_stages = Exchange(found, ranks.of_stages)
    exchange = Exchange(parts, ranks, from_stages)
    placed: dict[str, list[TensorToWrite]] = {}
    for tensor in exchange.own_tensors():
        file, begin = places[tensor.name]
        of_file = placed.setdefault(file, [])
        if is_shared:
            tensor = tensor._replace(offset=begin + (tensor.offset or 0))
            header = files[file][0]
            if tensor.offset == len(header):
                of_file.append(_bytes_to_write(header))
        else:
            tensor = tensor._replace(offset=None)
        of_file.append(tensor)
    for file, of_file in placed.items():
        write(folder / (_PARTIAL + file if is_direct else file), of_file)
    exchange.finish()
    if is_direct:
        ranks.wait()
    if ranks.is_first:
        for file in files if is_direct else ():
            (folder / (_PARTIAL + file)).replace(folder / file)
        _write_index(folder, stem, {f: {t.name: t.num_bytes for t in files[f][1]} for f in files})


def _files_of(
    stem: str, heads: Iterable[Sequence], max_shard_bytes: int
) -> dict[str, tuple[bytes, list[TensorToWrite]]]:
    """Header, and tensors with their places, of each file, for names, shapes and dtypes."""
    shards: list[list[TensorToWrite]] = [[]]
    filled = 0
    for name, shape, dtype in heads:
        tensor = TensorToWrite(name, tuple(shape), dtype)
        if shards[-1] and filled + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        count = f"{len(shards):05d}"
        names = [f"{stem}-{i + 1:05d}-of-{count}.safetensors" for i in range(len(shards))]
    files = {}
    for file, shard in zip(names, shards, strict=True):
        header = header_of(shard)
        begins = accumulate((tensor.num_bytes for tensor in shard), initial=len(header))
        files[file] = header, [t._replace(offset=b) for t, b in zip(shard, begins, strict=False)]
    return files


def _bytes_to_write(data: bytes) -> TensorToWrite:
    """The first bytes of a file."""
    array = np.frombuffer(data, np.uint8)
    return TensorToWrite("", array.shape, "U8", lambda: array, offset=0)


def _write_index(folder: Path, stem: str, sizes: dict[str, dict[str, int]]) -> None:
    """The index of several files; removes other files of an earlier save."""
    single = f"{stem}.safetensors"
    for stale in {*folder.glob(f"{stem}-*-of-*.safetensors"), folder / single}:
        if stale.name not in sizes:
            stale.unlink(missing_ok=True)
    index_file = folder / f"{single}.index.json"
    if len(sizes) == 1:
        index_file.unlink(missing_ok=True)
        return
    weight_map = {key: name for name, shard in sizes.items() for key in shard}
    total = sum(size for shard in sizes.values() for size in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    index_file.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
