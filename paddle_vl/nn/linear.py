"""Linear layers and embeddings of one device, and weights that hold several linears.

Weights are `[in, out]`, as everywhere in Paddle; HF checkpoints have them transposed.

A fused weight holds several linears of one input (query, key and value; gate and up) side by side:
`[in, out + out + ...]`, computed in one product. Checkpoints, settings and optimizer state name
each linear. If one of them is treated differently (frozen, its own learning rate, an adapter),
`separate` gives each linear its own weight; layers of both kinds are called alike.

Linears and their fused forms are drawn, adapted and separated alike.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.nn.initializer import Constant, Initializer, Normal, Uniform

from paddle_vl.nn.dispatch import operation
from paddle_vl.nn.lora import LowRank, LowRankSettings

# The logits `[R, V]` of rows and parameters.
Predict = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
# Makes a tensor of a head's predictions, its rows and its parameters, see `VocabHead.forward`.
Reduced = Callable[[Predict, Sequence[Tensor], Sequence[Tensor]], Tensor]


# dtype of parameters that stay float32 in a half-precision model, if their file has it so.
precise_dtype: ContextVar[Any] = ContextVar("precise_dtype", default="float32")


@contextmanager
def default_dtype(dtype: Any, precise: Any = "float32") -> Iterator[None]:
    """Layers built inside the block have parameters of this dtype, a name or Paddle's; those that
    take `precise_dtype` have `precise`."""
    before, token = paddle.get_default_dtype(), precise_dtype.set(precise)
    paddle.set_default_dtype(dtype)
    try:
        yield
    finally:
        precise_dtype.reset(token)
        paddle.set_default_dtype(before)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight + bias` with weight `[in, out]`: `[..., in]` to `[..., out]`, dtype of `x`."""
    product = getattr(weight, "product", None)
    if product is not None:
        return product(x, weight, bias)
    return paddle.matmul(x, weight) if bias is None else biased_linear(x, weight, bias)


@operation
def biased_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`x @ weight + bias`."""
    return F.linear(x, weight, bias)


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def use_product(weight: Tensor, product: Product | None) -> None:
    """Make `linear` call `product(x, weight, bias)` for this weight; None for its own product. One
    of fleet's may add to a float32 `main_grad` of the weight."""
    weight.product = product


def gradient_of(tensor: Tensor) -> Tensor | None:
    """The gradient for the optimizer: fleet's float32 `main_grad` if set, else `grad`."""
    main = getattr(tensor, "main_grad", None)
    return tensor.grad if main is None else main


class AdaptableLinear(nn.Layer):
    """A linear that may have a low-rank adapter.

    Attributes:
        input_axis: the dim of `weight` that the input features are on.
        lora: the adapter, None without.
    """

    input_axis = 0

    def __init__(self, *args: Any, **kwargs: Any):
        """
        Args:
            args, kwargs: arguments of the layer class that this is mixed into.
        """
        super().__init__(*args, **kwargs)
        self.lora: LowRank | None = None

    def add_low_rank(self, settings: LowRankSettings) -> None:
        """Add an adapter to this rank's weight."""
        sizes = self.weight.shape
        in_features, out_features = sizes[self.input_axis], sizes[1 - self.input_axis]
        self.lora = LowRank(in_features, out_features, settings, self.weight.dtype)

    def adapted(
        self,
        y: Tensor,
        x: Tensor,
        columns: slice | None = None,
        bias: Tensor | None = None,
        inner: Tensor | None = None,
    ) -> Tensor:
        """The linear's output `y`, or some columns of it, plus the adapter's output for `x`.

        Args:
            bias: what `y` has of a bias.
            inner: `x A`, where there is no dropout; None computes it.
        """
        lora = self.lora
        if lora is None:
            return y
        kept = lora.dropped(x)
        inner = paddle.matmul(kept, lora.A) if inner is None else inner
        if lora.magnitude is None:
            return y + lora.expanded(inner, columns)
        scales, weight = lora.scales(self.weight), self.weight
        if columns is not None:
            scales, weight = scales[columns], weight[:, columns]
        base = y if bias is None else y - bias
        if lora.drops:
            base = linear(kept, weight)
        return y + (scales - 1.0) * base + scales * lora.expanded(inner, columns)

    @paddle.no_grad()
    def merge_low_rank(self) -> None:
        """Put the adapter into the weight, in float32, and remove it."""
        if self.lora is None:
            return
        merged = self.lora.merged(self.weight.t() if self.input_axis else self.weight)
        merged = merged.t() if self.input_axis else merged
        paddle.assign(merged.astype(self.weight.dtype), self.weight)
        self.lora = None


class Linear(AdaptableLinear):
    """`y = x @ weight + bias`, weights drawn from a normal of std `init_std` and bias zero, or both
    uniformly in +-`bound`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        init_std: float = 0.02,
        bound: float | None = None,
    ):
        super().__init__()
        law, of_bias = Normal(std=init_std), Constant(0.0)
        if bound is not None:
            law = of_bias = Uniform(-bound, bound)
        shape = [in_features, out_features]
        self.weight = self.create_parameter(shape, default_initializer=law)
        self.bias = self.create_parameter(shape[1:], default_initializer=of_bias) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(linear(x, self.weight, self.bias), x, bias=self.bias)


class Embedding(nn.Layer):
    """Rows of a table `[num, dim]` by int64 ids: `[...]` to `[..., dim]`."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_std: float = 0.02,
        law: Initializer | None = None,
    ):
        super().__init__()
        self.weight = self.create_parameter(
            [num_embeddings, embedding_dim], default_initializer=law or Normal(std=init_std)
        )

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class VocabHead(AdaptableLinear):
    """Logits over the vocabulary; the weight is `[vocab, dim]` so that it can be the embedding's.

    Args:
        tied_weight: the embedding's parameter to use instead of one of its own.
    """

    input_axis = 1

    def __init__(
        self,
        embedding_dim: int,
        vocab_size: int,
        init_std: float = 0.02,
        tied_weight: Tensor | None = None,
    ):
        super().__init__()
        if tied_weight is None:
            self.weight = self.create_parameter(
                [vocab_size, embedding_dim], default_initializer=Normal(std=init_std)
            )
        else:
            # A plain attribute would register the parameter a second time.
            object.__setattr__(self, "weight", tied_weight)

    def forward(self, x: Tensor, reduced: Reduced | None = None) -> Tensor:
        """Logits `[..., vocab]`; or `reduced(predict, rows, parameters)`, where `predict(rows,
        parameters)` are the logits, for a loss that never has all of them.

        Sharded parameters exist during a call only, so the loss is computed in it.
        """
        rows, parameters = [x], [self.weight]
        if self.lora is not None:
            # Drawn once for all rows, however they are divided.
            rows.append(self.lora.dropped(x))
            parameters += [self.lora.A, self.lora.B]
            if self.lora.magnitude is not None:
                parameters.append(self.lora.scales(self.weight.t()))
        if reduced is None:
            return self._logits(rows, parameters)
        return reduced(self._logits, rows, parameters)

    def _logits(self, rows: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        y = paddle.matmul(rows[0], parameters[0], transpose_y=True)
        if self.lora is None:
            return y
        A, B = parameters[1:3]
        change = paddle.matmul(paddle.matmul(rows[1], A) * self.lora.settings.scaling, B)
        if self.lora.magnitude is not None:
            scales = parameters[3]
            base = paddle.matmul(rows[1], parameters[0], transpose_y=True) if self.lora.drops else y
            change = (scales - 1.0) * base + scales * change
        return y + change


class Columns(NamedTuple):
    """One linear of a fused weight.

    Attributes:
        name: the last component of the name of its module.
        width: its output features, before tensor parallelism splits them.
        num_heads: number of equal blocks of features that must stay on one rank; 0 where every
            feature stands alone.
        blocks: widths of several matrices side by side, each of which is divided over ranks by
            itself and has that many heads; empty for one matrix.
    """

    name: str
    width: int
    num_heads: int = 0
    blocks: tuple[int, ...] = ()


class FusedLinear(nn.Layer):
    """Linears without bias in one weight `[in, sum of out]`.

    Args:
        splits: return the output of each linear; False returns one tensor of all outputs.
    """

    def __init__(
        self,
        in_features: int,
        columns: Sequence[Columns],
        init_std: float = 0.02,
        splits: bool = True,
    ):
        super().__init__()
        widths = [one.width for one in columns]
        self.weight = self.create_parameter(
            [in_features, sum(widths)], default_initializer=NormalColumns(widths, init_std)
        )
        mark_fused(self.weight, columns)
        self.own_widths = widths if splits else []

    def forward(self, x: Tensor, num_rows: int | None = None) -> Sequence[Tensor]:
        """The output of each linear; `num_rows` is for layers that all-gather token rows."""
        return split_columns(linear(x, self.weight), self.own_widths)


class SeparateLinears(nn.Layer):
    """The same linears, each a sublayer with its own weight, under its own name.

    Args:
        enter: applied once to the common input.
        make: builds one of the linears.
    """

    def __init__(
        self,
        columns: Sequence[Columns],
        enter: Callable[..., Tensor],
        make: Callable[[Columns], AdaptableLinear],
    ):
        super().__init__()
        self.enter = enter
        for one in columns:
            self.add_sublayer(one.name, make(one))

    def forward(self, x: Tensor, num_rows: int | None = None) -> list[Tensor]:
        """The output of each linear."""
        x = self.enter(x, num_rows)
        return [layer(x) for layer in self.children()]


class NormalColumns(Initializer):
    """Draws each linear of a fused weight as if it had a weight of its own."""

    def __init__(self, widths: Sequence[int], std: float):
        super().__init__()
        self.widths, self.normal = list(widths), Normal(std=std)

    def forward(self, var: Tensor, block=None) -> Tensor | None:
        drawn = []
        for width in self.widths:
            one = paddle.empty([var.shape[0], width], dtype=var.dtype)
            self.normal(one, block)
            drawn.append(one)
        paddle.concat(drawn, axis=1)._share_underline_tensor_to(var)
        return None


def fused_columns(parameter: Tensor) -> tuple[Columns, ...]:
    """The linears of a fused weight, in order; empty for a weight of one linear."""
    return getattr(parameter, "fused_columns", ())


def mark_fused(parameter: Tensor, columns: Iterable[Columns]) -> None:
    """Record the linears of a fused weight."""
    parameter.fused_columns = tuple(columns)


def split_columns(x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
    """`[..., C]` as tensors of these widths; one tensor without widths.

    The outputs of the linears of a fused weight.
    """
    return paddle.split(x, list(widths), axis=-1) if widths else [x]


def column_slices(widths: Sequence[int]) -> list[slice]:
    """Slices of consecutive blocks of these widths."""
    starts = [sum(widths[:number]) for number in range(len(widths))]
    return [slice(start, start + width) for start, width in zip(starts, widths, strict=True)]


def whole_slices(parameter: Tensor) -> list[slice]:
    """The columns of each linear in the unsharded value of a fused weight."""
    return column_slices([columns.width for columns in fused_columns(parameter)])


def names_by_parameter(
    named_parameters: Iterable[tuple[str, Tensor]],
) -> list[tuple[Tensor, list[str]]]:
    """Every parameter once, with all of its names in order: one per linear of a fused weight.

    Raises:
        ValueError: some linears of a fused weight are missing.
    """
    groups: dict[int, tuple[Tensor, list[str]]] = {}
    for name, parameter in named_parameters:
        groups.setdefault(id(parameter), (parameter, []))[1].append(name)
    for parameter, names in groups.values():
        # A single name is that of the fused weight itself.
        if len(names) > 1 and len(names) != len(fused_columns(parameter)):
            fused = [columns.name for columns in fused_columns(parameter)]
            raise ValueError(
                f"{', '.join(names)} are of one weight, of {', '.join(fused) or 'one linear'}: "
                "they are trained together or not at all; separate the layer's projections first"
            )
    return list(groups.values())


@paddle.no_grad()
def separate(
    model: nn.Layer,
    weights: Iterable[Tensor],
    make: Callable[[int, Sequence[Columns]], SeparateLinears],
) -> None:
    """Replace fused linears of a model by separate ones with the same values.

    Args:
        weights: the fused weights.
        make: builds this rank's linears from input features and columns.
    """
    chosen = {id(weight) for weight in weights}
    if not chosen:
        return
    for parent in model.sublayers(include_self=True):
        for name, fused in list(parent.named_children()):
            weight = getattr(fused, "weight", None)
            if weight is not None and id(weight) in chosen:
                with default_dtype(weight.dtype), paddle.LazyGuard():
                    layers = make(weight.shape[0], fused_columns(weight))
                own = [one.weight for one in layers.children()]
                for one in own:
                    one.stop_gradient = weight.stop_gradient
                if weight._is_initialized():
                    values = paddle.split(weight, [one.shape[1] for one in own], axis=1)
                    for one, value in zip(own, values, strict=True):
                        value.clone()._share_buffer_to(one)
                parent.add_sublayer(name, layers)
