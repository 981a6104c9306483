"""STAND-IN. Contract of `src/paddlefleet/tensor_parallel/mappings.py`, forward and backward:

- `copy_to_tensor_model_parallel_region`: identity and all-reduce;
- `scatter_to_sequence_parallel_region`: this rank's rows of the first axis, which the size must
  divide, and all-gather.
"""

import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer


class _Copy(PyLayer):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        if ctx.group.nranks > 1:
            dist.all_reduce(total, group=ctx.group)
        return total


class _Scatter(PyLayer):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        assert x.shape[0] % group.nranks == 0, "the first axis does not divide by the ranks"
        return paddle.split(x, group.nranks)[group.rank].clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.group.nranks == 1:
            return gradient.clone()
        parts = []
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return paddle.concat(parts)


def copy_to_tensor_model_parallel_region(input_, group=None, is_expert=False):
    return _Copy.apply(input_, group)


def scatter_to_sequence_parallel_region(input_, group=None):
    return input_ if group is None else _Scatter.apply(input_, group)
