"""Names and layouts of a model's parameters in a checkpoint.

A rule maps a parameter name to a checkpoint key, with `*` for the same text in both, and has the
array's layout in the file. The first matching rule applies, so special cases come first. Reading
and writing use the same rules.

The model has linears of one input in one layer (`self_attn.qkv_proj`), fused into one weight or
separate; checkpoints have each under its own name (`self_attn.q_proj.weight`).
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from paddle import Tensor

from paddle_vl.nn.linear import fused_columns, whole_slices
from paddle_vl.nn.parameter_table import ParameterTable, Slices, taken

# Layers of linears of one input with separate weights.
_SEPARATE = re.compile(r"\.(?:qkv_proj|gate_up_proj|in_proj)(?=\.(?:\w+_proj|in_proj_\w+)\.)")


class Same:
    """The checkpoint's layout is the parameter's: embeddings, and heads `[vocab, dim]`.

    Base of the other layouts, which are reversible changes between checkpoint and parameter.

    Attributes:
        row_axis: the dim of the parameter that is the first one in the checkpoint.
    """

    row_axis = 0

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape in the checkpoint of a parameter of `shape`."""
        return shape

    def to_parameter(self, stored: np.ndarray) -> np.ndarray:
        return stored

    def to_stored(self, value: np.ndarray) -> np.ndarray:
        return value


class LinearWeights(Same):
    """Matrices are `[out, in]` in the checkpoint and `[in, out]` here; vectors are the same."""

    row_axis = -1

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1]

    def to_parameter(self, stored: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(stored.T)

    def to_stored(self, value: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(value.T)


@dataclass(frozen=True)
class PatchKernel(Same):
    """A convolution kernel `[out, *kernel]` that is a matrix `[prod(kernel), out]` here."""

    kernel: tuple[int, ...]
    row_axis = -1

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[1], *self.kernel)

    def to_parameter(self, stored: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(stored.reshape(stored.shape[0], -1).T)

    def to_stored(self, value: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(value.T).reshape(self.stored_shape(value.shape))


@dataclass(frozen=True)
class Rule:
    """`parameter` and `key` are names with at most one `*`, for the same text in both."""

    parameter: str
    key: str
    layout: Same


def low_rank_rules(rules: Iterable[Rule]) -> list[Rule]:
    """Rules for the parameters of adapters on the linears of rules that end in `*`."""
    suffixes = {"A": "lora_A.weight", "B": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
    return [
        Rule(f"{ours}*.lora.{name}", f"{theirs}*.{suffix}", LinearWeights())
        for rule in rules
        if isinstance(rule.layout, LinearWeights) and rule.parameter.endswith("*")
        for ours, theirs in [[n[:-1].removesuffix(".") for n in (rule.parameter, rule.key)]]
        for name, suffix in suffixes.items()
    ]


@dataclass(frozen=True)
class StoredParameter:
    """A parameter, or one of the linears fused in it, with its place in the checkpoint.

    Attributes:
        table: the model's, which has the parameter's `ParamSpec`.
        block: number of the linear in a fused parameter; None for a parameter that is not fused.
    """

    key: str
    parameter: Tensor
    layout: Same
    table: ParameterTable
    block: int | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in the checkpoint, of the full value."""
        return self.layout.stored_shape(self._full_shape)

    @property
    def _full_shape(self) -> tuple[int, ...]:
        shape = self.table.full_shape(self.parameter)
        if self.block is None:
            return shape
        return (shape[0], fused_columns(self.parameter)[self.block].width)

    def own_slices(self) -> Slices:
        """What this rank has of the full value that is stored under this key."""
        widths = ()
        if self.block is not None:
            columns = fused_columns(self.parameter)[self.block]
            widths = columns.blocks or (columns.width,)
        return self.table.own_slices(self.parameter, self._full_shape, widths)

    def from_stored(self, stored: np.ndarray) -> np.ndarray:
        """This rank's shard of the checkpoint's array, in the parameter's layout."""
        return taken(self.layout.to_parameter(stored), self.own_slices())

    def of_full(self, full: np.ndarray) -> np.ndarray:
        """The columns of the parameter's full value that are stored under this key."""
        return full if self.block is None else full[:, whole_slices(self.parameter)[self.block]]

    def of_own(self, value: np.ndarray) -> np.ndarray:
        """The same columns of this rank's value of the parameter, or of its gradient."""
        if self.block is None:
            return value
        return value[:, self.table.column_slices(self.parameter)[self.block]]


def shared_slices(
    make: Callable[[], np.ndarray], columns: Sequence[slice]
) -> list[Callable[[], np.ndarray]]:
    """Functions that return slices of an array, which is made when the first is requested, and
    freed after the last.

    Making it may be collective if all ranks request the same slices in the same order.

    Args:
        columns: the slices, each requested once.
    """
    made: list[np.ndarray] = []
    left = set(range(len(columns)))

    def one(number: int) -> np.ndarray:
        if not made:
            made.append(make())
        array = made[0]
        left.discard(number)
        if not left:
            made.clear()
        return array[:, columns[number]]

    return [partial(one, number) for number in range(len(columns))]


def by_parameter(placed: Iterable[StoredParameter]) -> list[list[StoredParameter]]:
    """The stored linears of each parameter, in order.

    Raises:
        ValueError: some of the linears of a fused parameter are not among them.
    """
    groups: dict[int, list[StoredParameter]] = {}
    for item in placed:
        groups.setdefault(id(item.parameter), []).append(item)
    for items in groups.values():
        names = [columns.name for columns in fused_columns(items[0].parameter)]
        if names and len(items) != len(names):
            raise ValueError(
                f"{', '.join(item.key for item in items)}: only these of {', '.join(names)} are "
                "given a value, but they are one weight: name all of them or none"
            )
    return list(groups.values())


def place_parameters(
    named_parameters: Iterable[tuple[str, Tensor]],
    rules: tuple[Rule, ...],
    table: ParameterTable,
) -> list[StoredParameter]:
    """Every parameter with its checkpoint key, in the model's order; a fused one has several.

    Raises:
        ValueError: a parameter that no rule covers.
    """
    placed, linears = [], list[tuple[str, Tensor, int | None]]()
    for name, parameter in named_parameters:
        if columns := fused_columns(parameter):
            outer = name.removesuffix(".weight").rpartition(".")[0]
            names = [f"{outer}.{one.name}.weight" for one in columns]
            linears += [(one, parameter, block) for block, one in enumerate(names)]
        else:
            linears.append((_SEPARATE.sub("", name), parameter, None))
    for name, parameter, block in linears:
        rule = next((rule for rule in rules if fnmatch.fnmatchcase(name, rule.parameter)), None)
        if rule is None:
            raise ValueError(f"no checkpoint rule covers parameter {name}")
        wildcard = re.fullmatch(re.escape(rule.parameter).replace(r"\*", "(.*)"), name)
        assert wildcard is not None, (name, rule.parameter)
        key = rule.key.replace("*", wildcard.group(1)) if wildcard.groups() else rule.key
        placed.append(StoredParameter(key, parameter, rule.layout, table, block))
    return placed
