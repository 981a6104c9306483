"""Filling a model from a checkpoint and writing it back, tensor by tensor."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.models.checkpoint.filling import FillStep
from paddle_vl.models.checkpoint.rules import StoredParameter
from paddle_vl.models.checkpoint.safetensors_io import (
    FLOATING,
    FileWriter,
    StoredTensor,
    TensorToWrite,
    read_checkpoint_headers,
    write_file,
)
from paddle_vl.models.checkpoint.sharded import write_tensors
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
        FillStep(item.parameter, partial(_read_into, item, stored[item.key])) for item in placed
    ]


def _read_into(item: StoredParameter, stored: StoredTensor) -> None:
    set_value(item.parameter, item.from_stored(stored.read()))


def set_value(parameter: Tensor, array: np.ndarray) -> None:
    """Give a parameter, with storage or without, a value in its own layout."""
    value = paddle.to_tensor(array)
    if value.dtype != parameter.dtype:
        value = value.astype(parameter.dtype)
    value._share_buffer_to(parameter)


def parameter_array(item: StoredParameter) -> np.ndarray:
    """A parameter's whole value in the checkpoint's layout; bfloat16 as its bits.

    Where ranks hold parts of it, all of them call this together.
    """
    return item.layout.to_stored(item.placement.whole_value(item.parameter))


def parameter_to_write(item: StoredParameter, name: str) -> TensorToWrite:
    """A parameter's whole value in the checkpoint's layout, as a tensor of that name."""
    return TensorToWrite(
        name,
        item.stored_shape,
        STORED_DTYPES[item.parameter.dtype],
        partial(item.placement.whole_value, item.parameter, copy=False),
        item.layout.to_stored,
    )


def drawn_values(
    placed: Iterable[StoredParameter], whole: Iterable[StoredParameter] | None = None
) -> list[FillStep]:
    """Steps that draw every parameter's fresh value from Paddle's global random state.

    Args:
        placed: built under `paddle.LazyGuard`.
        whole: those of the whole model, built in the same way, where `placed` are parts or some of
            them: the whole ones are drawn one by one, in order, and dropped again, so the weights
            are those of a single device with the same seed, and one whole tensor at most is in
            memory.
    """
    if whole is None:
        return [FillStep(item.parameter, item.parameter.initialize) for item in placed]
    part_of_key = {part.key: part for part in placed}
    steps = []
    for full in whole:
        part = part_of_key.get(full.key)
        parameter = None if part is None else part.parameter
        steps.append(FillStep(parameter, partial(_draw_part, full.parameter, part)))
    return steps


def _draw_part(full: Tensor, part: StoredParameter | None) -> None:
    full.initialize()
    array = None if part is None else full.astype("float32").numpy()
    full._clear_data()
    if part is not None:
        set_value(part.parameter, part.placement.own_part(part.parameter, array))


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
    tensors = [
        parameter_to_write(item, item.key)
        for item in placed
        if not getattr(item.parameter, "is_tied_copy", False)
    ]
    write_tensors(folder, "model", tensors, max_shard_bytes, writers, write)


def checkpoint_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model folder by key, unread."""
    return read_checkpoint_headers(Path(folder))
