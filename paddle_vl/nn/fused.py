"""Weights that hold several linears of one input: `[in, out + out + ...]`, columns side by side.

One product then makes queries, keys and values, or gate and up. Checkpoints, settings and the
optimizer's state go on naming the linears one by one.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import paddle
from paddle import Tensor


class Columns(NamedTuple):
    """One of the linears: the last part of its module's name, and its output features.

    Attributes:
        width: of the whole linear, where ranks hold parts of it.
        num_heads: so many equal pieces that ranks do not cut; 0 where every feature stands alone.
    """

    name: str
    width: int
    num_heads: int = 0


def fused_columns(parameter: Tensor) -> tuple[Columns, ...]:
    """The linears that a weight holds, in order; none for one that holds a single linear."""
    return getattr(parameter, "fused_columns", ())


def mark_fused(parameter: Tensor, columns: Iterable[Columns]) -> None:
    """Told once which linears a weight holds; the value of a traced graph takes no mark."""
    if isinstance(parameter, Tensor):
        parameter.fused_columns = tuple(columns)


def split_columns(x: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """What the linears of a fused weight made of their input; all of it side by side for none."""
    return paddle.split(x, list(widths), axis=-1) if widths else [x]


def column_slices(widths: Sequence[int]) -> list[slice]:
    """Where blocks of these widths lie beside each other."""
    starts = [sum(widths[:number]) for number in range(len(widths))]
    return [slice(start, start + width) for start, width in zip(starts, widths, strict=True)]


def whole_slices(parameter: Tensor) -> list[slice]:
    """Where the linears of a fused weight lie in its whole value."""
    return column_slices([columns.width for columns in fused_columns(parameter)])


def names_by_parameter(
    named_parameters: Iterable[tuple[str, Tensor]],
) -> list[tuple[Tensor, list[str]]]:
    """Every parameter once, with all of its names in order.

    Raises:
        ValueError: a fused weight with the names of some of its linears only.
    """
    groups: dict[int, tuple[Tensor, list[str]]] = {}
    for name, parameter in named_parameters:
        groups.setdefault(id(parameter), (parameter, []))[1].append(name)
    for parameter, names in groups.values():
        # A name of its own stands for all of it.
        if len(names) > 1 and len(names) != len(fused_columns(parameter)):
            held = [columns.name for columns in fused_columns(parameter)]
            raise ValueError(
                f"{', '.join(names)} are of one weight that holds {', '.join(held) or 'one linear'}"
                ": they are trained together or not at all; separate the layer's projections first"
            )
    return list(groups.values())
