"""Example inputs of every operation: sizes, arguments, and the table of all forms; and what an
implementation makes of them, for comparisons.

Shapes: T token rows, D width, N query heads, K key heads, H head width, E experts. Sizes of the
text are those of Qwen3-VL-8B per rank; a CPU takes fewer rows. `tests/single_card_tests/doctor`
fails where an operation has no example.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.batch.row_slices import RowSlice
from paddle_vl.nn.attention import (
    CachedKeys,
    PackedSamples,
    PagedKeys,
    RotaryTables,
    Segments,
    inverse_frequencies,
)
from paddle_vl.nn.attention_masks import (
    MASKED_SCORE,
    AttentionMask,
    BlockMask,
    HistoryMask,
    KeyMask,
    SliceMask,
)
from paddle_vl.nn.block_samples import BlockSamples, BlockSizes, equal_samples
from paddle_vl.nn.delta_rule import (
    CausalConvSiLU,
    Decay,
    DeltaCache,
    DeltaPool,
    DeltaRule,
    GatedRMSNorm,
)
from paddle_vl.nn.dispatch import Operation
from paddle_vl.nn.experts import Experts, GroupSizes, RoutedRows
from paddle_vl.nn.key_value_cache import KeyValueCache, KeyValuePool
from paddle_vl.nn.linear import Columns, FusedLinear, Linear, default_dtype
from paddle_vl.nn.ngram_embedding import ngram_hash
from paddle_vl.nn.operations import GemmaRMSNorm, RMSNorm

Dtype = Literal["float32", "bfloat16"]
# Key of the result among `values_and_gradients`.
OUTPUT = "the output"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the examples.

    Attributes:
        rows: token rows of pointwise operations and products.
        length: tokens of attention.
        width: channels of a token row.
        heads, key_heads, head_width: of attention.
    """

    rows: int
    length: int
    width: int
    heads: int
    key_heads: int
    head_width: int
    experts: int = 8


# For a comparison with the host in float32; and a faster one.
COMPARED = Sizes(512, 256, 1024, 8, 2, 128)
QUICK = Sizes(64, 48, 128, 4, 2, 32)
# Head widths of the families' attention beside that of `COMPARED`: towers, and pi07's backbone.
HEAD_WIDTHS = (64, 72, 80, 256)


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call.

    Attributes:
        args: arrays become tensors; those of floats get gradients and the dtype under test.
            Functions are called for each device and dtype, which is the default one there.
        tables: places in `args` whose floats stay float32 and get no gradient.
        defined: 1 where the output is defined and 0 elsewhere, where it must be finite; None for
            everywhere.
    """

    args: tuple[Any, ...]
    tables: tuple[int, ...] = ()
    defined: np.ndarray | None = None


Rng = np.random.Generator
Make = Callable[[Rng, Sizes], Inputs]


def normal(rng: Rng, *shape: int, scale: float = 1.0) -> np.ndarray:
    return np.float32(scale) * rng.standard_normal(shape, dtype=np.float32)


def tensors(inputs: Inputs, dtype: Dtype) -> list[Any]:
    """The arguments as tensors on Paddle's device."""
    made = []
    for place, value in enumerate(inputs.args):
        if isinstance(value, np.ndarray):
            is_float = value.dtype == np.float32 and place not in inputs.tables
            value = paddle.to_tensor(value)
            if is_float:
                value = value.astype(dtype)
                value.stop_gradient = False
        if callable(value) and not isinstance(value, Tensor):
            with default_dtype(dtype):
                value = value()
        made.append(value)
    return made


def _x(rng: Rng, s: Sizes, factor: int = 1) -> np.ndarray:
    """Token rows."""
    return normal(rng, s.rows, factor * s.width)


def _weight(rng: Rng, s: Sizes) -> np.ndarray:
    return 1 + normal(rng, s.width, scale=0.2)


def _biased_linear(r: Rng, s: Sizes) -> Inputs:
    inner = 3 * s.width
    return Inputs((_x(r, s), normal(r, s.width, inner, scale=s.width**-0.5), normal(r, inner)))


def _apply_rotary(r: Rng, s: Sizes, rotated: int | None = None) -> Inputs:
    q, k = (normal(r, s.rows, heads, s.head_width) for heads in (s.heads, s.key_heads))
    angle = np.arange(s.rows, dtype=np.float32)[:, None]
    angle = angle * inverse_frequencies((rotated or s.head_width) // 2, 5e6)
    return Inputs((q, k, lambda: RotaryTables.of_angles(paddle.to_tensor(angle))))


def _normed_rotary(r: Rng, s: Sizes, rotated: int, offset: float, gets: bool) -> Inputs:
    """With gradients, or as in generation."""
    args = _apply_rotary(r, s, rotated).args
    weights = (normal(r, s.head_width) for _ in range(2))
    return Inputs((*args, *weights, 1e-6, offset), () if gets else (0, 1, 3, 4))


def _permuted(r: Rng, s: Sizes, copies: int) -> Inputs:
    order = r.permutation(s.rows * copies)
    return Inputs((_x(r, s), order, np.argsort(order), copies))


def _grouped_linear(r: Rng, s: Sizes) -> Inputs:
    inner = s.width // 2
    counts = r.multinomial(s.rows, np.full(s.experts, 1 / s.experts))
    # An expert without rows, as happens.
    counts[1], counts[0] = 0, counts[0] + counts[1]
    weight = normal(r, s.experts, s.width, inner, scale=s.width**-0.5)
    sizes = lambda: GroupSizes(paddle.to_tensor(counts.astype(np.int64)))  # noqa: E731
    return Inputs((_x(r, s), weight, sizes))


def _routed_experts(r: Rng, s: Sizes, num_rows: int) -> Inputs:
    """Of a layer that answers: an expert has no rows."""
    inner, width, std = s.width // 2, s.width, s.width**-0.5
    gate_up = normal(r, s.experts, width, 2 * inner, scale=std)
    down = normal(r, s.experts, inner, width, scale=std)
    indices = np.stack([r.permutation(s.experts - 1)[:2] for _ in range(num_rows)])

    def make() -> Any:
        experts = Experts(s.experts, width, inner)
        experts.eval()
        for parameter, array in ((experts.gate_up_proj, gate_up), (experts.down_proj, down)):
            parameter.set_value(array)
            parameter.stop_gradient = True
        return experts

    x, weights = normal(r, num_rows, width), np.abs(normal(r, num_rows, 2))
    return Inputs((x, indices, weights, make, lambda: RoutedRows(num_rows)), tables=(0, 2))


def _batch(r: Rng, s: Sizes, queries: int | None = None) -> tuple[np.ndarray, ...]:
    """q_BLNH, k_BLKH, v_BLKH of a batch of two; the queries are the last ones."""
    q = normal(r, 2, queries or s.length, s.heads, s.head_width)
    return q, *(normal(r, 2, s.length, s.key_heads, s.head_width) for _ in range(2))


def _packed(r: Rng, s: Sizes) -> Inputs:
    n = s.length
    # A sample of one token among them.
    offsets = np.array([0, n // 3, n, n + 1, 2 * n])
    return Inputs((*_batch(r, s), None, lambda: PackedSamples(offsets, n)))


def _padded(r: Rng, s: Sizes) -> Inputs:
    """Padding on the left: its queries see no key, and their results are not used."""
    bias, defined = np.zeros([2, s.length], np.float32), np.ones([2, s.length, 1, 1], np.float32)
    bias[1, : s.length // 4], defined[1, : s.length // 4] = MASKED_SCORE, 0.0
    return Inputs((*_batch(r, s), bias), tables=(3,), defined=defined)


def _cached(r: Rng, s: Sizes, queries: int) -> Inputs:
    """Buffers with a quarter of their positions free."""
    shape, used = (2, s.key_heads, s.length, s.head_width), 3 * s.length // 4
    q = normal(r, 2, queries, s.heads, s.head_width)
    return Inputs((q, normal(r, *shape), normal(r, *shape), lambda: CachedKeys(used)))


def _appended(r: Rng, s: Sizes, hides: bool) -> Inputs:
    """A new token of each of two rows, which may hide their first keys; as in generation, without
    gradients."""
    (q, *made), used = _cached(r, s, 1).args, 3 * s.length // 4
    new = (normal(r, 2, 1, s.key_heads, s.head_width) for _ in range(2))
    bias = np.where(np.arange(used) < [[3], [0]], MASKED_SCORE, 0.0).astype(np.float32)
    args = (q, *new, *made[:2], lambda: CachedKeys(used, paddle.to_tensor(bias) if hides else None))
    return Inputs(args, tables=(0, 1, 2, 3, 4))


def _paged(r: Rng, s: Sizes, tables: tuple[int, ...] = ()) -> Inputs:
    """Rows of one key, of all and of some, in a memory of which a quarter is free."""
    order, lengths = r.permutation(2 * s.length), (1, s.length, s.length // 2 - 3)
    ends = np.cumsum([0, *lengths])
    places = np.split(order[: ends[-1]], ends[1:-1])
    memories = (normal(r, 2 * s.length, s.key_heads, s.head_width) for _ in range(2))
    args = (normal(r, 3, s.heads, s.head_width), *memories, lambda: PagedKeys(places))
    return Inputs(args, tables)


def _eighths(rng: Rng, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Numbers that every dtype has, for what is in layers; the scale is a power of two."""
    return np.round(8 * normal(rng, *shape)) / 8 * np.float32(2.0 ** round(np.log2(scale)))


def _with_weights(layer: Any, *arrays: np.ndarray) -> Any:
    """A layer whose parameters are these, without gradients."""
    for parameter, array in zip(layer.parameters(), arrays, strict=True):
        paddle.assign(paddle.to_tensor(array).astype(parameter.dtype), parameter)
        parameter.stop_gradient = True
    return layer


def _linear(r: Rng, columns: int, *widths: int, splits: bool = True) -> Callable[[], Any]:
    """Makes a linear without bias, of a model that answers; one of several outputs is fused."""
    array = _eighths(r, columns, sum(widths), scale=columns**-0.5)
    made = [Columns(str(number), width) for number, width in enumerate(widths)]

    def make() -> Any:
        linear: Any = FusedLinear(columns, made, splits=splits)
        if len(widths) == 1:
            linear = Linear(columns, widths[0], False)
        linear.eval()
        return _with_weights(linear, array)

    return make


def _swiglu_mlp(r: Rng, s: Sizes) -> Inputs:
    gate_up = _linear(r, s.width, 2 * s.width, 2 * s.width, splits=False)
    return Inputs((_x(r, s), gate_up, _linear(r, 2 * s.width, s.width)), tables=(0,))


def _self_attention(r: Rng, s: Sizes, is_gated: bool, is_paged: bool) -> Inputs:
    """A token of each of two rows behind others, as in generation; without gradients."""
    inner, keys, before = s.heads * s.head_width, s.key_heads * s.head_width, s.length // 2
    qkv = _linear(r, s.width, inner * (1 + is_gated), keys, keys)
    projection, weights = _linear(r, inner, s.width), [_eighths(r, s.head_width) for _ in range(2)]
    norm_class: Any = GemmaRMSNorm if is_gated else RMSNorm
    past = [_eighths(r, 2, before, heads, s.head_width) for heads in (s.heads, *[s.key_heads] * 2)]
    places = np.split(r.permutation(4 * s.length)[: 2 * (before + 1)], 2)
    rotated = s.head_width // (1 + is_gated) // 2
    angle = np.array([[3.0], [4.0]], np.float32)[:, None] * inverse_frequencies(rotated, 5e6)

    def layer() -> Any:
        norms = [_with_weights(norm_class(s.head_width), weight) for weight in weights]
        return SimpleNamespace(
            qkv_proj=qkv(),
            o_proj=projection(),
            biases=(),
            q_norm=norms[0],
            k_norm=norms[1],
            head_dim=s.head_width,
            is_gated=is_gated,
        )

    def cache() -> Any:
        q, k, v = (paddle.to_tensor(x).astype(paddle.get_default_dtype()) for x in past)
        if not is_paged:
            made = KeyValueCache()
            made.append(k, v)
            return made
        made = KeyValuePool(4 * s.length, s.key_heads, s.head_width, k.dtype)
        for row in range(2):
            own = slice(row, row + 1)
            made.attend(q[own], k[own], v[own], PagedKeys([places[row][:-1]], before))
        made.paged = PagedKeys(places)
        return made

    tables = lambda: RotaryTables.of_angles(paddle.to_tensor(angle))  # noqa: E731
    cached = (lambda: PagedKeys(places)) if is_paged else (lambda: CachedKeys(before + 1))
    return Inputs((normal(r, 2, s.width), layer, tables, cached, cache), tables=(0,))


def _gated_delta_net(r: Rng, s: Sizes, is_pool: bool) -> Inputs:
    """A token of each of two rows behind others, as in generation; without gradients."""
    c, heads, taps = s.head_width, s.heads, 4
    mixed, inner = (2 * s.key_heads + heads) * c, heads * c
    in_proj = _linear(r, s.width, mixed, inner, heads, heads)
    out_proj, norm = _linear(r, inner, s.width), _eighths(r, c)
    kernel, decays = _eighths(r, mixed, 1, taps), [_eighths(r, heads) for _ in range(2)]
    past = _eighths(r, 2, taps - 1, mixed), _eighths(r, 2, heads, c, c)
    paged = PagedKeys([np.arange(9), np.arange(7)], rows=[2, 1])

    def layer() -> Any:
        return SimpleNamespace(
            in_proj=in_proj(),
            conv1d=_with_weights(CausalConvSiLU(mixed, taps, 0.02), kernel),
            decay=_with_weights(Decay(heads), *decays),
            core=DeltaRule(),
            norm=_with_weights(GatedRMSNorm(c, 1e-6), norm),
            out_proj=out_proj(),
            key_dim=c,
            value_dim=c,
        )

    def cache() -> Any:
        made = DeltaPool(4) if is_pool else DeltaCache()
        if isinstance(made, DeltaPool):
            made.paged = paged
        made.inputs_BJE = paddle.to_tensor(past[0]).astype(paddle.get_default_dtype())
        made.state_BNCV, made.length = paddle.to_tensor(past[1]), 8
        return made

    tables = lambda: RotaryTables.of_angles(paddle.zeros([2, 1, 2], "float32"))  # noqa: E731
    args = (normal(r, 2, s.width), layer, tables, lambda: CachedKeys(9), cache)
    return Inputs(args, tables=(0,))


def _delta_rule(r: Rng, s: Sizes, *offsets: int, queries: int | None = None) -> Inputs:
    """A batch of two with a state before, or packed samples."""
    length, n, c = queries or s.length, s.heads, s.head_width
    q, k = (normal(r, 2, length, s.key_heads, c) for _ in range(2))
    decay = -0.1 * r.exponential(size=(2, length, n)).astype(np.float32)
    beta = r.random((2, length, n), dtype=np.float32)
    ends = np.array([0, *offsets, 2 * length])
    state = None if offsets else normal(r, 2, n, c, c)
    packed = (lambda: PackedSamples(ends, length)) if offsets else None
    args = (q, k, normal(r, 2, length, n, c), decay, beta, state, packed, True)
    return Inputs(args, tables=(3, 5))


def _trained_rule(r: Rng, s: Sizes, *offsets: int) -> Inputs:
    """Without states before and behind the sequences, and with a gradient of the decay."""
    made = _delta_rule(r, s, *offsets)
    return replace(made, args=(*made.args[:5], None, made.args[6], False), tables=())


def _convolution(r: Rng, s: Sizes, *offsets: int) -> Inputs:
    u, weight = normal(r, 2, s.length, s.width), normal(r, s.width, 4)
    if not offsets:
        return Inputs((u, weight, normal(r, 2, 3, s.width)))
    ends = np.array([0, *offsets, 2 * s.length])
    return Inputs((u, weight, None, lambda: PackedSamples(ends, s.length)))


def _dilated(r: Rng, s: Sizes, *offsets: int) -> Inputs:
    """Taps three tokens apart, of two samples with tokens before, or of one row of packed ones."""
    u, weight = normal(r, 2, s.length, s.width), normal(r, s.width, 4)
    if not offsets:
        return Inputs((u, weight, 3, normal(r, 2, 9, s.width)))
    ends = np.array([0, *offsets, s.length])
    places = np.arange(s.length) - np.repeat(ends[:-1], np.diff(ends))
    return Inputs((u[:1], weight, 3, np.zeros([1, 9, s.width], np.float32), places[None]))


def _ngrams(r: Rng, s: Sizes, is_packed: bool) -> Inputs:
    """Ids of two rows, some of them the boundary, behind others or as packed samples."""
    ids = r.integers(0, 248320, [2, s.length])
    ids[:, 5::9] = 248044
    constants = ngram_hash(0, 3, 8, 248320, 20_000_000, 1234)
    if is_packed:
        places = np.tile(np.arange(s.length) % (s.length // 3), 2)
        return Inputs((ids, lambda: constants, 248044, None, places))
    return Inputs((ids, lambda: constants, 248044, r.integers(0, 248320, [2, 2])))


def _ngram_gates(r: Rng, s: Sizes) -> Inputs:
    # Products that are not near zero, where the root is steep.
    streams, norms = _x(r, s, 4), [normal(r, 4 * s.width, scale=0.2) for _ in range(2)]
    return Inputs((streams, 0.5 * streams + _x(r, s, 4), *norms, 4, 1e-6))


def _read_streams(r: Rng, s: Sizes, writes: bool) -> Inputs:
    rank, channels, std = s.width // 8, 4 * s.width, (4 * s.width) ** -0.5
    down, up = normal(r, channels, rank, scale=4 * std), normal(r, rank, channels, scale=4 * std)
    inject = normal(r, channels, 4, scale=std) if writes else None
    return Inputs((_x(r, s, 4), normal(r, channels, scale=0.2), down, up, inject, 4, 1e-6))


def _block_samples(s: Sizes, batch: int = 1) -> BlockSamples:
    return equal_samples(batch, s.length, BlockSizes(4, s.length // 16))


def _block_keys(r: Rng, s: Sizes) -> Inputs:
    blocks, half = s.rows // 4, s.head_width // 2
    tables: Any = normal(r, blocks, half), normal(r, blocks, half)
    raw, weight = normal(r, blocks, 4, s.head_width), normal(r, s.head_width, scale=0.2)
    return Inputs((raw, weight, 1e-6, RotaryTables(*tables)))


def _chosen_blocks(r: Rng, s: Sizes) -> Inputs:
    q, keys = normal(r, s.length, 2, s.head_width), normal(r, s.length // 4, s.head_width)
    return Inputs((q, keys, lambda: _block_samples(s)))


def _best_blocks(r: Rng, s: Sizes) -> Inputs:
    """Scores of which some are equal, and many zero."""
    samples = _block_samples(s)
    (part,) = samples.parts
    scores = np.maximum(normal(r, part.count, part.blocks), 0.0).round(1)
    return Inputs((scores, part, samples.sizes), tables=(0,))


def _chosen(r: Rng, s: Sizes, batch: int) -> Inputs:
    """Any of the blocks that a query has behind it."""
    samples = _block_samples(s, batch)
    size, number = samples.sizes
    places = np.concatenate([part.places().numpy().ravel() for part in samples.parts])
    blocks = [np.sort(r.permutation((place + 1) // size)[:number]) for place in places]
    q = normal(r, batch * s.length, s.heads, s.head_width)
    k, v = (normal(r, batch * s.length, s.key_heads, s.head_width) for _ in range(2))
    chosen = np.array(blocks, dtype=np.int32)
    return Inputs((q, k, v, chosen, lambda: _block_samples(s, batch)))


def _segments(r: Rng, s: Sizes, *runs: tuple[int, int], as_runs: bool = True) -> Inputs:
    """Runs of so many segments of one length."""
    rows = sum(count * length for count, length in runs)
    q, k, v = (normal(r, rows, s.heads, s.head_width) for _ in range(3))
    own = (lambda: Segments(runs),) if as_runs else runs[0]
    return Inputs((q, k, v, *own))


def _masked(
    r: Rng, s: Sizes, mask: Callable[[], AttentionMask], implementation: str, *qkv: np.ndarray
) -> Inputs:
    qkv = qkv or _batch(r, s)
    return Inputs((*qkv, mask, s.head_width**-0.5, implementation))


def _dense(r: Rng, s: Sizes, implementation: str) -> Inputs:
    """Any mask; some queries see nothing."""
    visible = r.random([2, s.length, s.length]) < 0.7
    visible[:, :, 0], visible[1, 3:9] = True, False
    return _masked(r, s, lambda: AttentionMask(paddle.to_tensor(visible)), implementation)


def _blocks(r: Rng, s: Sizes, implementation: str) -> Inputs:
    """A block of images and text, a second one, causal tokens, and padding, which sees nothing."""
    real, marks = np.ones([2, s.length], bool), np.zeros([2, s.length], bool)
    marks[:, [s.length // 2, *range(3 * s.length // 4, s.length)]] = True
    real[1, -s.length // 8 :] = False
    mask = lambda: BlockMask(paddle.to_tensor(real), paddle.to_tensor(marks))  # noqa: E731
    return _masked(r, s, mask, implementation)


def _keys(r: Rng, s: Sizes) -> Inputs:
    queries, seen = s.length // 4, np.ones([2, s.length], bool)
    seen[1, s.length // 2 :] = False
    mask = lambda: KeyMask(paddle.to_tensor(seen), queries)  # noqa: E731
    return _masked(r, s, mask, "sdpa", *_batch(r, s, queries))


def _slice(r: Rng, s: Sizes, slices: int) -> Inputs:
    """The last of so many slices of packed samples, one of a token among them."""
    n, half = s.length, slices * s.length // 2
    offsets = np.array([0, half // 3, half, half + 1, slices * n])
    rows = RowSlice.of(offsets, slices - 1, slices).key_rows
    q = normal(r, 1, n, s.heads, s.head_width)
    k, v = (normal(r, 1, slices * n, s.key_heads, s.head_width) for _ in range(2))
    return _masked(r, s, lambda: SliceMask(paddle.to_tensor(rows), n), "sdpa", q, k, v)


def _history(r: Rng, s: Sizes) -> Inputs:
    """Past frames of two videos; of the second the first two are missing, and see nothing."""
    frames, patches, real = 6, s.length // 4, np.ones([2, 6], bool)
    real[1, :2] = False
    qkv = (normal(r, 2 * patches, frames, s.heads, s.head_width) for _ in range(3))
    mask = lambda: HistoryMask(paddle.to_tensor(real), patches)  # noqa: E731
    return _masked(r, s, mask, "sdpa", *qkv)


# Further forms of a call are named `NAME.FORM`.
ROWS: dict[str, Make] = {
    "row_sum": lambda r, s: Inputs((_x(r, s),)),
    "column_sum": lambda r, s: Inputs((_x(r, s),)),
    "rms_norm": lambda r, s: Inputs((_x(r, s), _weight(r, s), 1e-6)),
    "add_rms_norm": lambda r, s: Inputs((_x(r, s), _x(r, s), _weight(r, s), 1e-6)),
    "gemma_rms_norm": lambda r, s: Inputs((_x(r, s), _weight(r, s) - 1, 1e-6)),
    "rms_quotient": lambda r, s: Inputs((_x(r, s), 1e-6)),
    "layer_norm": lambda r, s: Inputs(
        (_x(r, s), _weight(r, s), normal(r, s.width, scale=0.1), 1e-6)
    ),
    "gelu": lambda r, s: Inputs((_x(r, s), False)),
    "gelu.tanh": lambda r, s: Inputs((_x(r, s), True)),
    "swiglu": lambda r, s: Inputs((_x(r, s, 3), _x(r, s, 3))),
    "swiglu.halves": lambda r, s: Inputs((_x(r, s, 6),)),
    "geglu": lambda r, s: Inputs((_x(r, s, 3), _x(r, s, 3))),
    "geglu.halves": lambda r, s: Inputs((_x(r, s, 6),)),
    "times_constant": lambda r, s: Inputs(
        (_x(r, s), r.random([s.rows, 1], np.float32)), tables=(1,)
    ),
    # Devices drop other entries, so what can be compared is that none is dropped.
    "dropout": lambda r, s: Inputs((_x(r, s), 0.0)),
    "causal_conv_silu": _convolution,
    "causal_conv_silu.packed": lambda r, s: _convolution(r, s, s.length // 3, s.length),
    "gated_rms_norm": lambda r, s: Inputs((_x(r, s), _x(r, s), _weight(r, s), 1e-6)),
    "gated_rms_norm.sigmoid": lambda r, s: Inputs((_x(r, s), _x(r, s), _weight(r, s), 1e-6, True)),
    "stream_norm": lambda r, s: Inputs((_x(r, s, 4), normal(r, 4 * s.width, scale=0.2), 4, 1e-6)),
    "read_streams": lambda r, s: _read_streams(r, s, writes=True),
    "read_streams.last": lambda r, s: _read_streams(r, s, writes=False),
    "write_streams": lambda r, s: Inputs((_x(r, s, 4), _x(r, s), normal(r, s.rows, 4))),
    "spread": lambda r, s: Inputs((_x(r, s), normal(r, s.rows, 4))),
    "ngram_rows": lambda r, s: _ngrams(r, s, is_packed=False),
    "ngram_rows.packed": lambda r, s: _ngrams(r, s, is_packed=True),
    "ngram_gates": _ngram_gates,
    "dilated_conv_silu": _dilated,
    "dilated_conv_silu.packed": lambda r, s: _dilated(r, s, s.length // 3, s.length - 2),
    "block_keys": _block_keys,
    "chosen_blocks": _chosen_blocks,
    "best_blocks": _best_blocks,
    "biased_linear": _biased_linear,
    "swiglu_mlp": _swiglu_mlp,
    "apply_rotary": _apply_rotary,
    "normed_rotary": lambda r, s: _normed_rotary(r, s, s.head_width, 0.0, gets=True),
    "normed_rotary.answer": lambda r, s: _normed_rotary(r, s, s.head_width, 0.0, gets=False),
    "normed_rotary.some": lambda r, s: _normed_rotary(r, s, s.head_width // 2, 1.0, gets=False),
    "permuted_copies": lambda r, s: _permuted(r, s, 2),
    "permuted_copies.once": lambda r, s: _permuted(r, s, 1),
    "grouped_linear": _grouped_linear,
    "routed_experts": lambda r, s: _routed_experts(r, s, s.rows),
    "routed_experts.few": lambda r, s: _routed_experts(r, s, s.experts // 2),
}
ATTENTION: dict[str, Make] = {
    "chosen_attention": lambda r, s: _chosen(r, s, 2),
    "block_attention": lambda r, s: _chosen(r, s, 1),
    "block_attention.batch": lambda r, s: _chosen(r, s, 2),
    "causal_attention": lambda r, s: Inputs(_batch(r, s)),
    "causal_attention.packed": _packed,
    "causal_attention.padded": _padded,
    "causal_attention.cached": lambda r, s: Inputs(_batch(r, s, 4)),
    "cached_attention": lambda r, s: _cached(r, s, 1),
    "cached_attention.prompt": lambda r, s: _cached(r, s, s.length // 2),
    "appended_attention": lambda r, s: _appended(r, s, hides=False),
    "appended_attention.padded": lambda r, s: _appended(r, s, hides=True),
    "paged_attention": _paged,
    # As in generation, without gradients.
    "paged_attention.answer": lambda r, s: _paged(r, s, (0, 1, 2)),
    "self_attention": lambda r, s: _self_attention(r, s, is_gated=False, is_paged=False),
    "self_attention.gated": lambda r, s: _self_attention(r, s, is_gated=True, is_paged=False),
    "self_attention.paged": lambda r, s: _self_attention(r, s, is_gated=False, is_paged=True),
    "equal_segments_attention": lambda r, s: _segments(r, s, (4, s.length // 4), as_runs=False),
    "runs_attention": lambda r, s: _segments(r, s, (2, s.length // 4), (1, s.length // 2)),
    # Lengths that no tile divides, and one row.
    "runs_attention.uneven": lambda r, s: _segments(r, s, (1, s.length - 5), (3, 7), (1, 1)),
    "masked_attention": lambda r, s: _dense(r, s, "eager"),
    "masked_attention.sdpa": lambda r, s: _dense(r, s, "sdpa"),
    "masked_attention.blocks": lambda r, s: _blocks(r, s, "sdpa"),
    "masked_attention.blocks_eager": lambda r, s: _blocks(r, s, "eager"),
    "masked_attention.keys": _keys,
    "masked_attention.slice": lambda r, s: _slice(r, s, 2),
    "masked_attention.all_rows": lambda r, s: _slice(r, s, 1),
    "masked_attention.history": _history,
}
DELTA_RULE: dict[str, Make] = {
    "gated_delta_net": lambda r, s: _gated_delta_net(r, s, is_pool=False),
    "gated_delta_net.pool": lambda r, s: _gated_delta_net(r, s, is_pool=True),
    "gated_delta_rule": _delta_rule,
    # Samples of a token, of a chunk and more, and of less.
    "gated_delta_rule.packed": lambda r, s: _delta_rule(
        r, s, s.length // 3, s.length // 3 + 1, s.length, 2 * s.length - 7
    ),
    "gated_delta_rule.token": lambda r, s: _delta_rule(r, s, queries=1),
    # As in training, and as in generation, without gradients.
    "gated_delta_rule.trained": _trained_rule,
    "gated_delta_rule.packed_trained": lambda r, s: _trained_rule(
        r, s, s.length // 3, s.length // 3 + 1, s.length, 2 * s.length - 7
    ),
    "gated_delta_rule.prompt": lambda r, s: replace(_delta_rule(r, s), tables=tuple(range(6))),
    "gated_delta_rule.answer": lambda r, s: replace(
        _delta_rule(r, s, queries=1), tables=tuple(range(6))
    ),
}
EXAMPLES = ROWS | ATTENTION | DELTA_RULE
# Their float32 may run in TF32 on a GPU.
PRODUCTS = {
    *ATTENTION,
    *DELTA_RULE,
    "biased_linear",
    "grouped_linear",
    "swiglu_mlp",
    "routed_experts",
}
PRODUCTS |= {"read_streams", "read_streams.last", "routed_experts", "routed_experts.few"}


def examples_of(operation: Operation) -> dict[str, Make]:
    """The operation's examples: its own, and its other forms."""
    name = name_of(operation)
    return {key: value for key, value in EXAMPLES.items() if key.split(".")[0] == name}


def name_of(operation: Any) -> str:
    """The name of an operation's function."""
    return operation.__name__


def values_and_gradients(
    call: Callable[..., Any], inputs: Inputs, dtype: Dtype = "float32"
) -> dict[str, np.ndarray]:
    """Output and gradients of a call on Paddle's device, as float32 on the host."""
    args = tensors(inputs, dtype)
    outputs = _tensors_among(call(*args))
    if inputs.defined is not None:
        # NaN where nothing is defined would reach the gradients: NaN times 0 is NaN.
        outputs = [out * paddle.to_tensor(inputs.defined).astype(out.dtype) for out in outputs]
    floats = [out for out in outputs if not out.stop_gradient]
    if floats:
        paddle.autograd.backward(floats, [_direction(out) for out in floats])
    values = {OUTPUT: np.concatenate([_on_host(out).ravel() for out in outputs])}
    for number, x in enumerate(args):
        if isinstance(x, Tensor) and x.grad is not None:
            values[f"gradient {number}"] = _on_host(x.grad)
    return values


def _tensors_among(result: Any) -> list[Tensor]:
    """The tensors of a call's result."""
    entries = result if isinstance(result, list | tuple) else [result]
    return [entry for entry in entries if isinstance(entry, Tensor)]


def _direction(out: Tensor) -> Tensor:
    """A gradient of the output with entries of both signs, the same on every device."""
    values = np.cos(np.arange(out.size, dtype=np.float64) * 1.7).astype(np.float32)
    return paddle.to_tensor(values.reshape(out.shape)).astype(out.dtype)


def _on_host(x: Tensor) -> np.ndarray:
    return x.detach().astype("float32").numpy()
