"""Fleet's tensor-parallel primitives against a plain computation."""

from functools import partial

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle.distributed.fleet.layers.mpu import mp_ops

from paddle_vl.parallel.gloo_fleet import install
from tests.multi_card_tests.gloo_checks.registry import (
    assert_equal,
    check,
    rank,
    rows_of_ranks,
    size,
    tensor,
)


def default_group():
    return dist.collective._get_default_group()


def with_gradient(values) -> paddle.Tensor:
    result = tensor(values)
    result.stop_gradient = False
    return result


@check()
def identity_primitive():
    x, weights = rows_of_ranks(2, 3), rows_of_ranks(3, 2)
    inputs = with_gradient(x[0])
    output = mp_ops._c_identity(inputs, group=default_group())
    (output * tensor(weights[rank()].T)).sum().backward()
    assert_equal(output, x[0])
    assert_equal(inputs.grad, weights.sum(axis=0).T)


@check()
def all_reduce_primitive():
    x, weights = rows_of_ranks(2, 3), rows_of_ranks(3, 2)[0].T
    inputs = with_gradient(x[rank()])
    output = mp_ops._mp_allreduce(inputs * 1.0, group=default_group())
    (output * tensor(weights)).sum().backward()
    assert_equal(output, x.sum(axis=0))
    assert_equal(inputs.grad, weights)


@check(flat_labels=False, label_column=True)
def cross_entropy_over_a_sharded_vocabulary(column):
    per_rank, ignored = 5, -7
    generator = np.random.default_rng(0)
    logits = 4 * generator.standard_normal((2, 6, per_rank * size())).astype("float32")
    labels = generator.integers(0, per_rank * size(), (2, 6))
    labels[0, 2] = labels[1, 5] = ignored
    weights = generator.random((2, 6)).astype("float32")
    plain = with_gradient(logits)
    expected = F.cross_entropy(
        plain, paddle.to_tensor(labels), reduction="none", ignore_index=ignored
    ).reshape([2, 6])
    (expected * tensor(weights)).sum().backward()

    own = slice(per_rank * rank(), per_rank * (rank() + 1))
    part = with_gradient(logits[..., own])
    label = paddle.to_tensor(labels[..., None] if column else labels)
    loss, softmax = mp_ops._c_softmax_with_cross_entropy(
        part, label, default_group(), return_softmax=True, ignore_index=ignored
    )
    (loss.squeeze(-1) * tensor(weights)).sum().backward()
    assert loss.shape == [2, 6, 1]
    assert loss[0, 2].item() == loss[1, 5].item() == 0
    close = partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-6)
    close(loss.squeeze(-1).numpy(), expected.numpy())
    close(softmax.numpy(), F.softmax(plain).numpy()[..., own])
    close(part.grad.numpy(), plain.grad.numpy()[..., own])
    assert not part.grad[0, 2].numpy().any()


@check()
def installing_again_changes_nothing():
    def patched():
        group = paddle.base.core.ProcessGroupGloo
        return group.all_reduce, dist.collective._new_process_group_impl, mp_ops._c_identity

    before = patched()
    assert install()
    assert patched() == before
