"""Filling a model from a checkpoint and writing it back, tensor by tensor."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.checkpoint.filling import FillStep
from paddle_vl.checkpoint.rules import StoredParameter, by_parameter
from paddle_vl.checkpoint.safetensors_io import (
    FLOATING,
    FileWriter,
    StoredTensor,
    TensorToWrite,
    read_checkpoint_headers,
    write_file,
)
from paddle_vl.checkpoint.sharded import write_tensors
from paddle_vl.checkpoint.shared_array import SharedArray
from paddle_vl.nn.linear import whole_slices
from paddle_vl.nn.placement import Writers

DEFAULT_SHARD_BYTES = 5_000_000_000
STORED_DTYPES = {
    paddle.float32: "F32",
    paddle.float64: "F64",
    paddle.float16: "F16",
    paddle.bfloat16: "BF16",
}


class Keyed(Protocol):
    """What has a place in a checkpoint."""

    @property
    def key(self) -> str: ...

    @property
    def stored_shape(self) -> tuple[int, ...]: ...


def check_keys(
    folder: Path,
    stored: dict[str, StoredTensor],
    placed: Iterable[Keyed],
    ignored: set[str],
    owner: str = "the model of its config.json",
) -> None:
    """Compare a checkpoint's keys and shapes with a model's before anything is read.

    Args:
        owner: whose parameters they have to be, for the message.

    Raises:
        ValueError: every missing, unexpected and misshapen key, and those that hold other things
            than floating point numbers, all at once.
    """
    wanted = {item.key: item.stored_shape for item in placed}
    missing = sorted(set(wanted) - set(stored))
    unexpected = sorted(set(stored) - set(wanted) - ignored)
    misshapen = [
        f"{key} (file {list(stored[key].shape)}, model {list(shape)})"
        for key, shape in sorted(wanted.items())
        if key in stored and tuple(stored[key].shape) != shape
    ]
    no_weights = [
        f"{key} ({stored[key].dtype})"
        for key in sorted(wanted)
        if key in stored and stored[key].dtype not in FLOATING
    ]
    problems = [
        f"{len(keys)} {kind}: {', '.join(keys)}"
        for kind, keys in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("misshapen", misshapen),
            ("not of floating point numbers", no_weights),
        )
        if keys
    ]
    if problems:
        raise ValueError(f"the checkpoint in {folder} does not fit {owner}; " + "; ".join(problems))


def fill_parameters(placed: Iterable[StoredParameter], stored: dict[str, StoredTensor]) -> None:
    """Give every parameter its stored value."""
    for step in stored_values(placed, stored):
        step.give()


def stored_values(
    placed: Iterable[StoredParameter], stored: dict[str, StoredTensor]
) -> list[FillStep]:
    """Steps that give every parameter its stored value.

    The parameters may still be without storage (built under `paddle.LazyGuard`): each takes over
    the tensor made from its file, so that beside the model one tensor at most is in memory.
    """
    return [
        FillStep(items[0].parameter, partial(_read_into, items, [stored[i.key] for i in items]))
        for items in by_parameter(placed)
    ]


def _read_into(items: Sequence[StoredParameter], stored: Sequence[StoredTensor]) -> None:
    parameter, placement = items[0].parameter, items[0].placement
    if items[0].block is None:
        set_value(parameter, items[0].from_stored(stored[0].read()))
        return
    joined = paddle.empty(parameter.shape, parameter.dtype)
    slices = placement.column_slices(parameter)
    for item, one, columns in zip(items, stored, slices, strict=True):
        joined[:, columns] = paddle.to_tensor(item.from_stored(one.read())).astype(joined.dtype)
    joined._share_buffer_to(parameter)


def set_value(parameter: Tensor, array: np.ndarray) -> None:
    """Give a parameter, with storage or without, a value in its own layout."""
    value = paddle.to_tensor(array)
    if value.dtype != parameter.dtype:
        value = value.astype(parameter.dtype)
    value._share_buffer_to(parameter)


def parameter_array(item: StoredParameter) -> np.ndarray:
    """What is stored of a parameter, whole, in the checkpoint's layout; bfloat16 as its bits.

    Where ranks hold parts of it, all of them call this together.
    """
    return item.layout.to_stored(item.of_whole(item.placement.whole_value(item.parameter)))


def parameters_to_write(placed: Iterable[StoredParameter], prefix: str = "") -> list[TensorToWrite]:
    """Whole values in the checkpoint's layout, under `prefix` and key; tied copies left out.

    Where ranks hold parts, a fused parameter is put together once for all of its linears.
    """
    tensors = []
    for items in by_parameter(placed):
        parameter, placement = items[0].parameter, items[0].placement
        if getattr(parameter, "is_tied_copy", False):
            continue
        produce = [partial(placement.whole_value, parameter, copy=False)]
        if items[0].block is not None:
            produce = SharedArray(produce[0], whole_slices(parameter)).parts()
        dtype = STORED_DTYPES[parameter.dtype]
        tensors += [
            TensorToWrite(prefix + i.key, i.stored_shape, dtype, make, i.layout.to_stored)
            for i, make in zip(items, produce, strict=True)
        ]
    return tensors


def drawn_values(
    placed: Iterable[StoredParameter], whole: Iterable[StoredParameter] | None = None
) -> list[FillStep]:
    """Steps that draw every parameter's fresh value from Paddle's global random state.

    Args:
        placed: built under `paddle.LazyGuard`.
        whole: those of the whole model, built in the same way, where `placed` are parts or some of
            them, or apart where these are fused: the whole ones are drawn one by one, in order, and
            dropped again, so the weights are those of a single device with the same seed, and one
            whole tensor at most is in memory.
    """
    if whole is None:
        return [
            FillStep(items[0].parameter, items[0].parameter.initialize)
            for items in by_parameter(placed)
        ]
    part_of_key = {part.key: part for part in placed}
    steps = []
    for fulls in by_parameter(whole):
        draw = partial(_drawn, fulls[0].parameter)
        parts = by_parameter(part_of_key[full.key] for full in fulls if full.key in part_of_key)
        if not parts:
            steps.append(FillStep(None, draw))
        elif len(parts) == 1:
            steps.append(FillStep(parts[0][0].parameter, partial(_take_part, parts[0], draw)))
        else:
            # Fused there and apart here.
            values = SharedArray(draw, whole_slices(fulls[0].parameter)).parts()
            steps += [
                FillStep(part.parameter, partial(_take_part, [part], value))
                for (part,), value in zip(parts, values, strict=True)
            ]
    return steps


def _drawn(full: Tensor) -> np.ndarray:
    full.initialize()
    array = full.astype("float32").numpy()
    full._clear_data()
    return array


def _take_part(parts: Sequence[StoredParameter], draw: Callable[[], np.ndarray]) -> None:
    parameter, placement = parts[0].parameter, parts[0].placement
    set_value(parameter, placement.own_part(parameter, draw()))


def save_parameters(
    folder: Path,
    placed: Iterable[StoredParameter],
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    writers: Writers | None = None,
    write: FileWriter = write_file,
) -> None:
    """Write the weights of a model folder, in shards when they exceed `max_shard_bytes`.

    Where ranks hold parts, all of them call this together and share the writing.
    """
    tensors = parameters_to_write(placed)
    write_tensors(folder, "model", tensors, max_shard_bytes, writers, write)


def checkpoint_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model folder by key, unread."""
    return read_checkpoint_headers(Path(folder))
