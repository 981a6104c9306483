"""`paddle_vl.nn.residual_streams` on the CPU, mostly by compiled kernels; see
`paddle_vl.nn.cpu.compiled`.

Shapes: as there.
"""

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.cpu.kernels import (
    contiguous,
    empty,
    has_graph,
    is_dense,
    library,
    num_threads,
    run,
)

# Numbers of a chunk of rows, and its fewest and most rows.
_CHUNK, _FEWEST, _MOST = 1 << 16, 8, 128


class _Read(PyLayer):
    """Keeps of all C-wide tensors only the streams, which a later layer keeps too."""

    @staticmethod
    def forward(ctx, x, norm, down, up, inject, streams, epsilon):
        (rows, channels), rank = x.shape, down.shape[1]
        width, keeps = channels // streams, has_graph(ctx)
        read = empty([rows, width])
        writes = None if inject is None else empty([rows, streams])
        low = empty([rows, rank]) if keeps else None
        most = min(max(_FEWEST, min(_MOST, _CHUNK // channels)), rows)
        of_row = 2 * channels + 3 * rank + streams
        room = empty([num_threads(), most * of_row])
        sizes = (rows, streams, width, rank, epsilon, most)
        library().read_streams_forward(
            *(x, norm, down, up, inject, read, writes, low, *sizes, room, room.shape[1])
        )
        if keeps:
            given = [x, norm, down, up] if inject is None else [x, norm, down, up, inject]
            ctx.needs, ctx.sizes = [not t.stop_gradient for t in given], sizes
            # A copy: an output that is kept would never be freed.
            kept = None if writes is None else writes.clone()
            ctx.save_for_backward(x, norm, down, up, inject, low, kept)
        return read, writes

    @staticmethod
    def backward(ctx, grad_read, grad_writes=None):
        x, norm, down, up, inject, low, writes = ctx.saved_tensor()
        _, streams, _, rank, _, most = ctx.sizes
        channels = x.shape[1]
        grads = [empty(t.shape) for t in (x, norm, down, up)]
        grads += [] if inject is None else [empty(inject.shape)]
        found = [g if need else None for g, need in zip(grads, ctx.needs, strict=True)]
        of_row, summed = 3 * channels + 3 * rank + 2 * streams, 1 + 2 * rank + streams
        room = empty([num_threads(), most * of_row + channels * summed])
        library().read_streams_backward(
            *(x, norm, down, up, inject, low, writes, contiguous(grad_read)),
            *(None if grad_writes is None else contiguous(grad_writes), grads[0]),
            *(*found[1:], None)[:4],
            *(*ctx.sizes, room, room.shape[1]),
        )
        return tuple(found)


def fits_read(x_TC: Tensor, *weights: Tensor | float | None) -> bool:
    """Whether `read_streams` takes these."""
    return is_dense(x_TC, *weights)


def read_streams(
    x_TC: Tensor,
    norm_C: Tensor,
    down_CR: Tensor,
    up_RC: Tensor,
    inject_CS: Tensor | None,
    streams: int,
    epsilon: float,
) -> tuple[Tensor, Tensor | None]:
    """`residual_streams.read_streams`."""
    return run(_Read, x_TC, norm_C, down_CR, up_RC, inject_CS, streams, epsilon)


class _Write(PyLayer):
    @staticmethod
    def forward(ctx, x, out, weights):
        y, sizes = empty(x.shape), (*weights.shape, out.shape[1])
        library().write_streams_forward(x, out, weights, y, *sizes)
        ctx.save_for_backward(out, weights)
        ctx.needs, ctx.sizes = [not t.stop_gradient for t in (x, out, weights)], sizes
        return y

    @staticmethod
    def backward(ctx, grad):
        out, weights = ctx.saved_tensor()
        grad, grads = contiguous(grad), [empty(t.shape) for t in (out, weights)]
        library().write_streams_backward(out, weights, grad, *grads, *ctx.sizes)
        return tuple(g if need else None for g, need in zip((grad, *grads), ctx.needs, strict=True))


def fits_write(x_TC: Tensor, out_TD: Tensor, weights_TS: Tensor) -> bool:
    """Whether `write_streams` takes these."""
    return is_dense(x_TC, out_TD, weights_TS)


def write_streams(x_TC: Tensor, out_TD: Tensor, weights_TS: Tensor) -> Tensor:
    """`residual_streams.write_streams`."""
    return run(_Write, x_TC, out_TD, weights_TS)


def spread(out_TD: Tensor, weights_TS: Tensor) -> Tensor:
    """`residual_streams.spread` as a matrix product, whose gradients are products too."""
    return paddle.matmul(weights_TS.unsqueeze(2), out_TD.unsqueeze(1)).flatten(1)
