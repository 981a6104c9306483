"""The experts' batched product; its backward pass keeps no copies of the matrices."""

import paddle
from paddle.autograd import PyLayer

from paddle_vl.nn.experts import Blocks, blocked_product, grouped_linear


@grouped_linear.register("gpu")
class _BlockedLinear(PyLayer):
    """`grouped_linear` in blocks. Autograd would keep each block's copy of its expert's matrix; the
    backward pass copies again instead."""

    @staticmethod
    def forward(ctx, x_NI, weight_EIO, counts_E):
        blocks = Blocks.of(counts_E, x_NI.shape[0])
        ctx.save_for_backward(x_NI, weight_EIO, blocks.place, blocks.expert)
        ctx.num_rows = blocks.num_rows
        ctx.needs = (not x_NI.stop_gradient, not weight_EIO.stop_gradient)
        return blocked_product(x_NI, weight_EIO, blocks)

    @staticmethod
    def backward(ctx, grad_NO):
        x_NI, weight_EIO, place_N, expert_B = ctx.saved_tensor()
        blocks = Blocks(place_N, expert_B, ctx.num_rows)
        needs_x, needs_weight = ctx.needs
        grad_x = grad_weight = None
        if needs_x:
            grad_x = blocked_product(grad_NO, weight_EIO, blocks, transposed=True)
        if needs_weight:
            grad_BIO = paddle.matmul(blocks.filled(x_NI), blocks.filled(grad_NO), transpose_x=True)
            # The sum over an expert's blocks as a product, which is deterministic.
            numbers_E1 = paddle.arange(weight_EIO.shape[0], dtype="int64").unsqueeze(1)
            is_of_EB = (numbers_E1 == expert_B.unsqueeze(0)).astype(grad_BIO.dtype)
            grad_weight = paddle.matmul(is_of_EB, grad_BIO.reshape([expert_B.shape[0], -1]))
            grad_weight = grad_weight.reshape(weight_EIO.shape)
        return grad_x, grad_weight, None
