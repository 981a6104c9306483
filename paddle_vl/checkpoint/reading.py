"""Values of a model's parameters, read from a checkpoint or drawn, one tensor at a time.

Models are built under `paddle.LazyGuard`, without storage, and materialized parameter by parameter.
Each parameter is sharded before the next one gets storage, so that a rank never needs more memory
than its shards and one full tensor.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.checkpoint.rules import Same, StoredParameter, by_parameter, shared_slices
from paddle_vl.nn.linear import whole_slices
from paddle_vl.nn.parameter_table import ParameterTable, Spread, taken

if TYPE_CHECKING:
    from paddle_vl.checkpoint.safetensors_io import StoredTensor


# Every rank reads smaller tensors itself: a message takes longer.
SHARED_VALUES = 1 << 18
# Of larger tensors so many are in memory beside the parameter.
PART_VALUES = 1 << 26
# Endings of quantized weights: FP8, compressed-tensors, GPTQ and AWQ, bitsandbytes, MLX.
_OF_QUANTIZED = ("_scale", "_scale_inv", ".weight_packed", ".qweight", ".absmax", ".scales")
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class ReadableTensor(Protocol):
    """A tensor of a checkpoint, not yet read; see `StoredTensor`."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, *, must_be_finite: bool = True) -> np.ndarray: ...


@runtime_checkable
class DivisibleTensor(ReadableTensor, Protocol):
    """One of which some rows may be read."""

    def narrowed(self, first: int, last: int) -> "DivisibleTensor": ...


class ChangedTensor(NamedTuple):
    """A stored tensor that is changed when it is read, to another shape."""

    stored: ReadableTensor
    shape: tuple[int, ...]
    change: Callable[[np.ndarray], np.ndarray]

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    def read(self, *, must_be_finite: bool = True) -> np.ndarray:
        """As `StoredTensor.read`."""
        return self.change(self.stored.read(must_be_finite=must_be_finite))


class MaterializeStep(NamedTuple):
    """A function that gives one parameter its value.

    Attributes:
        parameter: None if another rank has it; its random numbers are drawn on this rank too, so
            that later draws are equal on all ranks.
        run: called once, in order.
        beside: another parameter whose value it reads: it runs right after that one's step.
    """

    parameter: Tensor | None
    run: Callable[[], object]
    beside: Tensor | None = None


class Materializable(nn.Layer):
    """A layer whose parameters may not have storage yet."""

    _sources: list[Callable[[], Iterable[MaterializeStep]]] | None = None

    def materialize_later(self, steps: Callable[[], Iterable[MaterializeStep]]) -> None:
        """Set the source of values, after building under `paddle.LazyGuard`.

        Args:
            steps: called when the model is materialized, for its parameters at that time.
        """
        self._sources = [steps]

    def materialize_too(self, steps: Callable[[], Iterable[MaterializeStep]]) -> None:
        """Add values of new parameters, or replace some values.

        They are set at once if the model is already materialized.
        """
        if self._sources is None:
            for step in steps():
                step.run()
        else:
            self._sources.append(steps)

    def materialize(self) -> Iterator[Tensor]:
        """Every parameter once, in the same order on all ranks. A parameter gets its value when the
        iterator reaches it, after the caller is done with the one before."""
        steps, self._sources = self._steps(), None
        readers, done = defaultdict[int, list[MaterializeStep]](list), set()
        for step in steps:
            if step.beside is not None:
                readers[id(step.beside)].append(step)
        for first in steps:
            group = [] if first.beside is not None else [first, *readers[id(first.parameter)]]
            for step in group:
                step.run()
            for parameter in (step.parameter for step in group):
                if parameter is not None:
                    done.add(id(parameter))
                    yield parameter
        yield from (p for p in self.parameters() if id(p) not in done)

    def materialize_all(self) -> None:
        """Give all parameters storage and values."""
        for _ in self.materialize():
            pass

    def _steps(self) -> list[MaterializeStep]:
        steps = [step for source in self._sources or [] for step in source()]
        # A later step for the same parameter replaces the earlier one.
        last = {id(step.parameter): step for step in steps}
        return [s for s in steps if s.parameter is None or last[id(s.parameter)] is s]


class UnreadParameters:
    """The parameters of a loaded model that is not materialized: each is read when it is written,
    and released. What `paddle_vl.checkpoint.writing` calls of a `ParameterStore`."""

    def __init__(self, model: Materializable):
        self._steps = {id(step.parameter): step for step in model._steps()}

    def gathered_value(self, parameter: Tensor) -> Tensor:
        self._steps[id(parameter)].run()
        value = parameter.clone()
        parameter._clear_data()
        return value

    def spread(self, parameter: Tensor, value: Tensor | None = None) -> Spread:
        return Spread(None, partial(self.gathered_value, parameter))


class Keyed(Protocol):
    """An object with a key in a checkpoint."""

    @property
    def key(self) -> str: ...

    @property
    def stored_shape(self) -> tuple[int, ...]: ...


def check_keys(
    folder: Path,
    stored: Mapping[str, ReadableTensor],
    wanted: Iterable[Keyed],
    ignored: AbstractSet[str],
    owner: str = "the model of its config.json",
) -> None:
    """Compare a checkpoint's keys and shapes with a model's before anything is read.

    Args:
        wanted: required parameters.
        ignored: other keys that are allowed.
        owner: the model, for the message.

    Raises:
        ValueError: lists every key that is missing, unexpected, misshapen or not of a floating
            point dtype.
    """
    from paddle_vl.checkpoint.safetensors_io import FLOATING
    from paddle_vl.files.stored_settings import UNQUANTIZED

    shapes = {item.key: item.stored_shape for item in wanted}
    found = [(key, stored[key], shapes[key]) for key in sorted(shapes) if key in stored]
    keys_of = {
        "missing": sorted(set(shapes) - set(stored)),
        "unexpected": sorted(set(stored) - set(shapes) - ignored),
        "misshapen": [
            f"{key} (file {list(tensor.shape)}, model {list(shape)})"
            for key, tensor, shape in found
            if tuple(tensor.shape) != shape
        ],
        "not of floating point numbers": [
            f"{key} ({tensor.dtype})" for key, tensor, _ in found if tensor.dtype not in FLOATING
        ],
    }
    problems = [f"{len(keys)} {kind}: {', '.join(keys)}" for kind, keys in keys_of.items() if keys]
    if any(key.endswith(_OF_QUANTIZED) for key in keys_of["unexpected"]):
        problems.append(UNQUANTIZED)
    if problems:
        raise ValueError(f"the checkpoint in {folder} does not fit {owner}; " + "; ".join(problems))


def chosen_dtype(dtype: Any, stored: Mapping[str, ReadableTensor]) -> Any:
    """The dtype to build a model in: for "auto" that of the checkpoint's first weight."""
    if dtype != "auto":
        return dtype
    return next((_NAMES[t.dtype] for t in stored.values() if t.dtype in _NAMES), "float32")


def checkpoint_tensors(folder: Path) -> "dict[str, StoredTensor]":
    """The tensors of a model folder by key, unread."""
    from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers

    return read_checkpoint_headers(Path(folder))


def fill_parameters(
    parameters: Iterable[StoredParameter], stored: Mapping[str, ReadableTensor]
) -> None:
    """Give every parameter its stored value."""
    for step in stored_values(parameters, stored):
        step.run()


def stored_values(
    parameters: Iterable[StoredParameter], stored: Mapping[str, ReadableTensor]
) -> list[MaterializeStep]:
    """Steps that give every parameter its stored value.

    A parameter without storage takes over the tensor made from its file.
    """

    def read(items: Sequence[StoredParameter]) -> None:
        stored_value(items, stored)._share_buffer_to(items[0].parameter)

    return [
        MaterializeStep(items[0].parameter, partial(read, items))
        for items in by_parameter(parameters)
    ]


def stored_value(items: Sequence[StoredParameter], stored: Mapping[str, ReadableTensor]) -> Tensor:
    """The stored value of a parameter, in its shape and dtype.

    Args:
        items: of the parameter, several of a fused one.
    """
    first = items[0]
    dtype, parts = first.parameter.dtype, _row_parts(first, stored[first.key])
    if first.block is None and len(parts) < 2:
        value = paddle.to_tensor(own_value(first, stored[first.key]))
        return value if value.dtype == dtype else value.astype(dtype)
    joined = paddle.empty(first.parameter.shape, dtype)
    if first.block is None:
        begin, is_split = 0, 0 in first.own_slices()
        for rows in parts:
            value = paddle.to_tensor(_read_rows(first, stored[first.key], rows, is_split))
            joined[begin : begin + value.shape[0]] = value.astype(dtype)
            begin += value.shape[0]
        return joined
    slices = first.table.column_slices(first.parameter)
    for item, columns in zip(items, slices, strict=True):
        value = paddle.to_tensor(own_value(item, stored[item.key]))
        joined[:, columns] = value.astype(dtype)
    return joined


def own_value(item: StoredParameter, stored: ReadableTensor) -> np.ndarray:
    """This rank's shard of a stored tensor, in the parameter's layout.

    It reads the rows of the file that the shard is made of; all of them for columns of the file.
    Ranks that need the same rows read equal parts of them and all-gather these; see
    `ParameterTable.readers`.
    """
    if not isinstance(stored, DivisibleTensor) or not stored.shape:
        return item.from_stored(stored.read())
    slices = dict(item.own_slices())
    axis = item.layout.row_axis % len(item.parameter.shape)
    rows = slices.pop(axis, None)
    parts = [
        _read_rows(item, stored, each, rows is not None)
        for each in rows or [slice(0, stored.shape[0])]
    ]
    read = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return taken(item.layout.to_parameter(read), slices)


def _row_parts(item: StoredParameter, stored: ReadableTensor) -> list[slice]:
    """The rows that this rank's shard of a large table is made of, some at once; none of a tensor
    that is read at once, or whose rows are no rows of the parameter."""
    is_large = math.prod(stored.shape) > PART_VALUES
    if not is_large or type(item.layout) is not Same or not isinstance(stored, DivisibleTensor):
        return []
    slices = dict(item.own_slices())
    rows = slices.pop(0, [slice(0, stored.shape[0])])
    step = max(PART_VALUES // math.prod(stored.shape[1:]), 1)
    return [
        slice(begin, min(begin + step, each.stop))
        for each in rows
        for begin in range(each.start, each.stop, step)
        if not slices
    ]


def _read_rows(item: StoredParameter, stored: Any, rows: slice, is_split: bool) -> np.ndarray:
    readers = item.table.readers(item.table[item.parameter], is_split)
    return _shared_rows(stored.narrowed(rows.start, rows.stop), item.table, readers)


def _shared_rows(stored: DivisibleTensor, table: ParameterTable, readers: Sequence[Any]):
    """A tensor that the ranks of these groups need, and so the ranks of theirs."""
    from paddle_vl.checkpoint.safetensors_io import NUMPY_DTYPES, encoded, is_finite, widened

    count, number = stored.shape[0], 0
    # With fewer rows than ranks the gathered rows would be padding.
    while readers and math.prod(group.nranks for group in readers) > count:
        readers = readers[1:]
    if not readers or math.prod(stored.shape) < SHARED_VALUES:
        return stored.read()
    for group in readers:
        number = number * group.nranks + group.rank
    length = -(-count // math.prod(group.nranks for group in readers))
    first, last = (min(each * length, count) for each in (number, number + 1))
    # In the dtype of the file, which may have fewer bytes.
    bits = np.zeros([length, *stored.shape[1:]], NUMPY_DTYPES[stored.dtype])
    if first < last:
        own = stored.narrowed(first, last).read(must_be_finite=False)
        bits[: last - first] = encoded(own, stored.dtype)
    for group in reversed(readers):
        bits = table.gather_rows(bits, group)
    values = widened(bits[:count], stored.dtype)
    # Each rank raises the error, which names the file.
    return values if is_finite(values.reshape(-1)) else stored.read()


def set_value(parameter: Tensor, array: np.ndarray) -> None:
    """Give a parameter, with or without storage, a value of its shape and layout."""
    value = paddle.to_tensor(array)
    if value.dtype != parameter.dtype:
        value = value.astype(parameter.dtype)
    value._share_buffer_to(parameter)


def drawn_values(
    parameters: Iterable[StoredParameter], full: Iterable[StoredParameter] | None = None
) -> list[MaterializeStep]:
    """Steps that draw every parameter's initial value from Paddle's global random state.

    Args:
        parameters: without storage.
        full: the full model's, without storage, if `parameters` are shards, only some of them, or
            separate linears of fused ones. Full tensors are drawn in order, one in memory at a
            time, so the weights are those of a single device with the same seed. Of a row table
            (`paddle_vl.nn.row_table`) each rank draws its own rows.
    """
    if full is None:
        return [
            MaterializeStep(items[0].parameter, items[0].parameter.initialize)
            for items in by_parameter(parameters)
        ]
    own = {item.key: item for item in parameters}
    steps = []

    def drawn(parameter: Tensor) -> np.ndarray:
        parameter.initialize()
        array = parameter.astype("float32").numpy()
        parameter._clear_data()
        return array

    def take(items: Sequence[StoredParameter], draw: Callable[[], np.ndarray]) -> None:
        parameter = items[0].parameter
        set_value(parameter, items[0].table.own_shard(parameter, draw()))

    for items in by_parameter(full):
        draw = partial(drawn, items[0].parameter)
        targets = by_parameter(own[item.key] for item in items if item.key in own)
        if items[0].table[items[0].parameter].is_table:
            from paddle_vl.nn.row_table import draw_seed

            target = targets[0][0].parameter if targets else None
            run = draw_seed if target is None else target.initialize
            steps.append(MaterializeStep(target, run))
        elif not targets:
            steps.append(MaterializeStep(None, draw))
        elif len(targets) == 1:
            steps.append(MaterializeStep(targets[0][0].parameter, partial(take, targets[0], draw)))
        else:
            # Fused in the full model and separate here.
            values = shared_slices(draw, whole_slices(items[0].parameter))
            steps += [
                MaterializeStep(target.parameter, partial(take, [target], value))
                for (target,), value in zip(targets, values, strict=True)
            ]
    return steps
