"""Writing of parameters or other tensors into several files, divided over ranks.

The files are HF's: `model.safetensors`, or `model-00001-of-00004.safetensors` and so on with
`model.safetensors.index.json`, with full tensors. Sharded tensors are all-gathered one at a time,
and the rank that writes the file keeps it. So no rank ever has the full model, all ranks write, and
the files do not depend on the number of ranks. `write_one_file` is for readers that know no index.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import paddle

from paddle_vl.checkpoint.rules import StoredParameter, by_parameter, shared_slices
from paddle_vl.checkpoint.safetensors_io import FileWriter, TensorToWrite, bytes_of, write_file
from paddle_vl.nn.linear import whole_slices
from paddle_vl.nn.parameter_table import Saved
from paddle_vl.nn.placement import CheckpointRanks

if TYPE_CHECKING:
    from paddle_vl.nn.master_weights import ParameterStore

DEFAULT_SHARD_BYTES = 5_000_000_000
# A smaller file is not worth a rank of its own.
MIN_SHARD_BYTES = 1 << 26
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
    return item.layout.to_stored(item.of_full(_full_value(item, store)))


def parameters_to_write(
    parameters: Iterable[StoredParameter], prefix: str = "", store: "ParameterStore | None" = None
) -> list[TensorToWrite]:
    """Full values in the checkpoint's layout, under `prefix` and key; tied copies left out.

    A sharded fused parameter is all-gathered once for all of its linears.

    Args:
        store: of the model in training; None if every parameter has storage of its own.
    """
    tensors = []
    for items in by_parameter(parameters):
        first = items[0]
        spec = first.table[first.parameter]
        if not spec.joins_saving:
            continue
        produce = [partial(_full_value, first, store, copy=False)]
        if first.block is not None:
            produce = shared_slices(produce[0], whole_slices(first.parameter))
        dtype = STORED_DTYPES[first.parameter.dtype]
        tensors += [
            TensorToWrite(
                prefix + i.key,
                i.stored_shape,
                dtype,
                make,
                i.layout.to_stored,
                spec.saved is Saved.JOINED,
            )
            for i, make in zip(items, produce, strict=True)
        ]
    return tensors


def save_parameters(
    folder: Path,
    parameters: Iterable[StoredParameter],
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    ranks: CheckpointRanks | None = None,
    write: FileWriter = write_file,
    store: "ParameterStore | None" = None,
    others: Iterable[TensorToWrite] = (),
) -> None:
    """Write the weights of a model folder, see `write_tensors` and `parameters_to_write`.

    Args:
        others: tensors of this stage that belong to no parameter.
    """
    tensors = [*parameters_to_write(parameters, store=store), *others]
    write_tensors(folder, "model", tensors, max_shard_bytes, ranks, write)


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
        tensors: tensors of this rank's layers, the same on every rank with these layers.
        max_shard_bytes: size of the largest file, unless a single tensor is larger.
        ranks: None for this rank alone.
        write: writes a file of tensors; it produces their arrays before it returns.
    """
    ranks, tensors = ranks or CheckpointRanks(), list(tensors)
    skipped = [tensor.produce for tensor in tensors if tensor.is_joined]
    tensors = [tensor for tensor in tensors if not tensor.is_joined]
    total = sum(tensor.num_bytes for tensor in tensors)
    share = max(-(-total // ranks.size), MIN_SHARD_BYTES)
    # Consecutive tensors of each file, which ends at the share, or before it exceeds the limit.
    shards: list[list[TensorToWrite]] = []
    filled = 0
    for tensor in tensors:
        if not shards or filled >= share or filled + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    sizes = ranks.gather_stages([{t.name: t.num_bytes for t in shard} for shard in shards])
    every_shard = [shard for shards_of_stage in sizes for shard in shards_of_stage]
    single = f"{stem}.safetensors"
    names = [single]
    if len(every_shard) > 1:
        count = f"{len(every_shard):05d}"
        names = [f"{stem}-{i + 1:05d}-of-{count}.safetensors" for i in range(len(every_shard))]
    first = sum(len(shards_of_stage) for shards_of_stage in sizes[: ranks.stage])
    for number, shard in enumerate(shards):
        if number % ranks.size != ranks.rank:
            skipped += [tensor.produce for tensor in shard]
            continue
        # Before its first tensor this rank joins the collectives of tensors that others write.
        produce = partial(_produced_after, skipped, shard[0].produce)
        write(folder / names[first + number], [shard[0]._replace(produce=produce), *shard[1:]])
        skipped = []
    for produce in skipped:
        produce()
    if ranks.is_first:
        _write_index(folder, stem, dict(zip(names, every_shard, strict=True)))


def write_one_file(
    folder: Path,
    stem: str,
    tensors: Iterable[TensorToWrite],
    ranks: CheckpointRanks | None = None,
    write: FileWriter = write_file,
) -> None:
    """Write tensors into one file, whatever its size; collective over the checkpoint ranks.

    The first rank writes it. Other stages send their tensors, one at a time.

    Args:
        stem, tensors, ranks, write: as of `write_tensors`.
    """
    ranks, tensors = ranks or CheckpointRanks(), list(tensors)
    own = [tensor for tensor in tensors if not tensor.is_joined]
    heads = ranks.gather_stages([[t.name, list(t.shape), t.dtype] for t in own])
    if not ranks.is_first:
        for tensor in [*(t for t in tensors if t.is_joined), *own]:
            array = tensor.produce()
            if ranks.rank == 0 and not tensor.is_joined:
                ranks.send_to_first(bytes_of(tensor, array))
        return
    assert len(own) == len(tensors), "the first stage writes what it shares with others"
    for stage, heads_of_stage in enumerate(heads[1:], start=1):
        own += [_of_stage(ranks, stage, *head) for head in heads_of_stage]
    single = f"{stem}.safetensors"
    write(folder / single, own)
    _write_index(folder, stem, {single: {}})


def _full_value(
    item: StoredParameter, store: "ParameterStore | None", copy: bool = True
) -> np.ndarray:
    value = None if store is None else store.gathered_value(item.parameter)
    return item.table.full_value(item.parameter, value, copy)


def _produced_after(
    skipped: Sequence[Callable[[], np.ndarray]], produce: Callable[[], np.ndarray]
) -> np.ndarray:
    for other in skipped:
        other()
    return produce()


def _of_stage(
    ranks: CheckpointRanks, stage: int, name: str, shape: Sequence[int], dtype: str
) -> TensorToWrite:
    """A tensor of another stage, received when it is written."""
    tensor = TensorToWrite(
        name,
        tuple(shape),
        dtype,
        lambda: tensor.array_of(ranks.receive_at_first(stage, tensor.num_bytes)),
    )
    return tensor


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
