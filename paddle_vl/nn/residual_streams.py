"""Several residual streams beside each other, of which a sublayer reads one gated mean and to which
it writes back with a weight for each stream (hyper-connections with gates).

A token row has the streams side by side: stream s is channels s * D to (s + 1) * D - 1. Nothing
goes from one stream to another but through a sublayer.

Shapes: T token rows, S streams, D width of a stream, C = S * D; R rank of the gate's factors.

Source: Qwen4ExpTextGatedResidual of HF transformers, modeling_qwen4_exp.py; of the idea Zhu et al.,
Hyper-Connections, https://arxiv.org/abs/2409.19606.
"""

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.autograd import PyLayer
from paddle.nn.initializer import Constant, Normal

from paddle_vl.nn.dispatch import on_both, operation
from paddle_vl.nn.operations import column_sum, rms_quotient, row_sum


@operation
def stream_norm(x_TC: Tensor, weight_C: Tensor, streams: int, epsilon: float) -> Tensor:
    """`x / sqrt(mean(x^2) + epsilon) * (1 + weight)`, the mean over each stream by itself.

    Computed in float32 and cast to the dtype of `x` at the end.

    Returns:
        `[T, C]` in the dtype of `x`.
    """
    scale_C = 1.0 + weight_C.astype("float32")
    return (_stream_quotient(x_TC, streams, epsilon) * scale_C).astype(x_TC.dtype)


def _stream_quotient(x_TC: Tensor, streams: int, epsilon: float) -> Tensor:
    """float32 `[T, C]`."""
    rows, width = x_TC.shape
    return rms_quotient(x_TC.reshape([-1, width // streams]), epsilon).reshape([rows, width])


@operation
def read_streams(
    x_TC: Tensor,
    norm_C: Tensor,
    down_CR: Tensor,
    up_RC: Tensor,
    inject_CS: Tensor | None,
    streams: int,
    epsilon: float,
) -> tuple[Tensor, Tensor | None]:
    """What a sublayer gets of the streams, and the weights with which it writes to them.

    With u the `stream_norm` of the streams, the input is the mean over them of `g_s * u_s`, where
    `g = sigmoid(up(silu(down(u) / S)))` has a gate for each channel of each stream.

    Args:
        norm_C: weight of the norm.
        down_CR, up_RC: factors of the gates.
        inject_CS: of the weights `2 * sigmoid(inject(u) / S)`; None for no weights.

    Returns:
        Input `[T, D]` and weights `[T, S]`, in the dtype of `x`.
    """
    u_TC = stream_norm(x_TC, norm_C, streams, epsilon)
    mixed_TR = F.silu(paddle.matmul(u_TC, down_CR) / streams)
    gated_TC = F.sigmoid(paddle.matmul(mixed_TR, up_RC)) * u_TC
    read_TD = _mean_of_streams(gated_TC, streams)
    if inject_CS is None:
        return read_TD, None
    return read_TD, 2.0 * F.sigmoid(paddle.matmul(u_TC, inject_CS) / streams)


def _mean_of_streams(x_TC: Tensor, streams: int) -> Tensor:
    """`[T, D]` in the dtype of `x`, summed in float32."""
    parts = paddle.split(x_TC.astype("float32"), streams, axis=-1)
    return (sum(parts[1:], parts[0]) / streams).astype(x_TC.dtype)


@operation
def write_streams(x_TC: Tensor, out_TD: Tensor, weights_TS: Tensor) -> Tensor:
    """`x_s + weights_s * out` for each stream s: `[T, C]`."""
    return x_TC + spread(out_TD, weights_TS)


def spread(out_TD: Tensor, weights_TS: Tensor) -> Tensor:
    """`weights_s * out` for each stream s: `[T, C]`."""
    parts = paddle.split(weights_TS, weights_TS.shape[1], axis=-1)
    return paddle.concat([part_T1 * out_TD for part_T1 in parts], axis=-1)


class ReadStreams(PyLayer):
    """`read_streams` that keeps of all C-wide tensors only the streams, which a later layer keeps
    too; norm and gates are computed again."""

    @staticmethod
    def forward(ctx, x, norm, down, up, inject, streams, epsilon):
        u = stream_norm(x, norm, streams, epsilon)
        low = paddle.matmul(u, down)
        gate = F.sigmoid(paddle.matmul(F.silu(low / streams), up))
        # Half the weights: an output that is kept would never be freed.
        half = None if inject is None else F.sigmoid(paddle.matmul(u, inject) / streams)
        ctx.streams, ctx.epsilon = streams, epsilon
        given = [x, norm, down, up] if inject is None else [x, norm, down, up, inject]
        ctx.needs = [not t.stop_gradient for t in given]
        ctx.save_for_backward(x, norm, down, up, inject, low, half)
        return _mean_of_streams(gate * u, streams), None if half is None else 2.0 * half

    @staticmethod
    def backward(ctx, d_read, d_weights=None):
        x, norm, down, up, inject, low, half = ctx.saved_tensor()
        streams, dtype = ctx.streams, x.dtype
        quotient = _stream_quotient(x, streams, ctx.epsilon)
        scale = 1.0 + norm.astype("float32")
        u = (quotient * scale).astype(dtype)
        scaled = low / streams
        mixed = F.silu(scaled)
        gate = F.sigmoid(paddle.matmul(mixed, up))
        d_gated = paddle.concat([d_read / streams] * streams, axis=-1)
        d_u = d_gated * gate
        # gate * u is d_u's factor of u too: the derivative of the sigmoid takes 1 - gate besides.
        d_up_out = d_u * u * (1.0 - gate)
        del gate, d_gated
        d_mixed = paddle.matmul(d_up_out, up, transpose_y=True)
        d_up = paddle.matmul(mixed, d_up_out, transpose_x=True) if ctx.needs[3] else None
        del d_up_out
        share = F.sigmoid(scaled)
        d_low = d_mixed * share * (1.0 + scaled * (1.0 - share)) / streams
        d_u = d_u + paddle.matmul(d_low, down, transpose_y=True)
        d_down = paddle.matmul(u, d_low, transpose_x=True) if ctx.needs[2] else None
        d_inject = []
        if inject is not None:
            d_out = d_weights * half * (1.0 - half) * (2.0 / streams)
            d_u = d_u + paddle.matmul(d_out, inject, transpose_y=True)
            d_inject = [paddle.matmul(u, d_out, transpose_x=True) if ctx.needs[4] else None]
        d_u = d_u.astype("float32")
        d_norm = column_sum(d_u * quotient).astype(norm.dtype) if ctx.needs[1] else None
        d_x = None
        if ctx.needs[0]:
            d_x = _quotient_gradient(x, quotient, d_u * scale, streams, ctx.epsilon)
        return d_x, d_norm, d_down, d_up, *d_inject


read_streams.kernels = on_both(ReadStreams)


def _quotient_gradient(
    x_TC: Tensor, quotient_TC: Tensor, d_TC: Tensor, streams: int, epsilon: float
) -> Tensor:
    """The gradient of `x` from that of its quotient."""
    width = x_TC.shape[1] // streams
    x, quotient, d = (t.reshape([-1, width]) for t in (x_TC, quotient_TC, d_TC))
    x = x.astype("float32")
    inverse = paddle.rsqrt(row_sum(x * x) / width + epsilon)
    along = row_sum(d * quotient) / width
    return ((d - quotient * along) * inverse).reshape(x_TC.shape).astype(x_TC.dtype)


class Weight(nn.Layer):
    """A parameter called `weight`, without a computation of its own: a constant at first, or drawn
    from a normal."""

    def __init__(self, shape: list[int], init_std: float = 0.0):
        super().__init__()
        law = Normal(std=init_std) if init_std else Constant(0.0)
        self.weight = self.create_parameter(shape, default_initializer=law)


class StreamReader(nn.Layer):
    """`read_streams` with parameters under the checkpoint's names.

    Args:
        width: D.
        rank: R.
        is_last: behind the last layer, which writes nothing; it returns the input alone.
    """

    def __init__(
        self,
        width: int,
        streams: int,
        rank: int,
        epsilon: float,
        init_std: float,
        is_last: bool = False,
    ):
        super().__init__()
        self.streams, self.epsilon = streams, epsilon
        channels = streams * width
        self.hc_norm = Weight([channels])
        self.input_mix_weight_down = Weight([channels, rank], init_std)
        self.input_mix_weight_up = Weight([rank, channels], init_std)
        self.block_inject_weight = None if is_last else Weight([channels, streams], init_std)

    def forward(self, x_TC: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Input `[T, D]` of a sublayer and, unless `is_last`, its weights `[T, S]`."""
        inject = self.block_inject_weight
        read_TD, weights_TS = read_streams(
            x_TC,
            self.hc_norm.weight,
            self.input_mix_weight_down.weight,
            self.input_mix_weight_up.weight,
            None if inject is None else inject.weight,
            self.streams,
            self.epsilon,
        )
        return read_TD if weights_TS is None else (read_TD, weights_TS)
