"""Defects of fleet's sharding optimizer, in plain fleet.

If a test fails here on a newer Paddle, the defect is fixed, and its workaround in
`paddle_vl.parallel.sharding` or `paddle_vl.parallel.collectives` can go.
"""

from functools import partial

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.utils.hybrid_parallel_util import (
    fused_allreduce_gradients_with_group,
)

from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.topology import initialize
from tests.support.launch import launch, outcome_of, run_checks

pytestmark = pytest.mark.heavy
OPTIONS = {"split_param": True, "comm_overlap": False, "release_gradients": False}


def built(**options):
    """A model of two linears and fleet's optimizer for it."""
    configs = fleet.fleet._user_defined_strategy.strategy.hybrid_configs.sharding_configs
    configs.accumulate_steps = 1
    for name, value in {**OPTIONS, **options}.items():
        setattr(configs, name, value)
    paddle.seed(0)
    model = nn.LayerList([nn.Linear(64, 2, bias_attr=False) for _ in range(2)])
    adamw = paddle.optimizer.AdamW(0.1, parameters=model.parameters(), weight_decay=0.0)
    return model, fleet.distributed_optimizer(adamw)


def loss_of(model, layers=(0, 1), row: float = 1.0):
    rows = paddle.full([1, 64], row * (1 + dist.get_rank()))
    return sum((model[number](rows) ** 2).sum() for number in layers)


def gathered(tensor) -> np.ndarray:
    everyone: list[paddle.Tensor] = []
    dist.all_gather(everyone, tensor.clone())
    return paddle.stack(everyone).numpy()


def first_step_leaves_dp_out() -> list[bool]:
    """Whether the ranks of a dp group have the same summed gradients after each step."""
    model, optimizer = built()
    same = []
    for _ in range(2):
        loss_of(model).backward()
        before = gathered(optimizer._inner_opt._comm_buffer_list[0].grad_storage)
        optimizer.step()
        own = gathered(optimizer._inner_opt._comm_buffer_list[0].grad_storage)
        assert not np.array_equal(before[0], before[2])
        # Ranks 0 and 2 have the same shard of the parameters.
        same.append(np.array_equal(own[0][:128], own[2][:128]))
        for buffer in optimizer._inner_opt._comm_buffer_list:
            buffer.grad_storage.zero_()
    return same


def released_gradients_with_dp() -> str:
    model, optimizer = built(release_gradients=True)
    loss_of(model).backward()
    optimizer.step()
    optimizer.clear_grad(set_to_zero=False)
    loss_of(model).backward()
    with pytest.raises(AssertionError) as raised:
        optimizer.step()
    return type(raised.value).__name__


def cleared_gradients_leave_the_buffer() -> list[bool]:
    """Whether gradients use fleet's buffer, before and after they have been cleared."""
    model, optimizer = built()
    (buffer,) = optimizer._inner_opt._comm_buffer_list
    found = []
    for _ in range(2):
        loss_of(model).backward()
        found.append(model[0].weight.grad._is_shared_buffer_with(buffer.grad_storage))
        optimizer.step()
        optimizer.clear_grad()
    return found


def overlap_without_a_gradient() -> str:
    model, optimizer = built(comm_overlap=True)
    loss_of(model, layers=[0]).backward()
    with pytest.raises(AssertionError) as raised:
        optimizer.step()
    return str(raised.value)


def gather_overlap_with_a_frozen_layer() -> str:
    model, optimizer = built()
    frozen = nn.Linear(64, 2)
    for parameter in frozen.parameters():
        parameter.stop_gradient = True
    model.append(frozen)
    optimizer._set_all_gather_overlap_forward(True, model)
    loss_of(model).backward()
    optimizer.step()
    with pytest.raises(KeyError) as raised:
        loss_of(model, layers=[2])
    return type(raised.value).__name__


def sums_of_what_is_there() -> list[float]:
    """Gradients of both layers when rank 0 has one for the first and rank 1 for the second."""
    model = nn.LayerList([nn.Linear(64, 2, bias_attr=False) for _ in range(2)])
    model[dist.get_rank()].weight.sum().backward()
    group = fleet.get_hybrid_communicate_group().get_sharding_parallel_group()
    fused_allreduce_gradients_with_group(model.parameters(), group, scale=1.0)
    return [layer.weight.grad is None or layer.weight.grad.max().item() for layer in model]


def worker_of_two() -> dict:
    initialize(ParallelDegrees(sharding_degree=2))
    checks = (
        cleared_gradients_leave_the_buffer,
        overlap_without_a_gradient,
        gather_overlap_with_a_frozen_layer,
        sums_of_what_is_there,
    )
    return run_checks({check.__name__: partial(check) for check in checks})


def worker_of_four() -> dict:
    initialize(ParallelDegrees(sharding_degree=2, dp_degree=2))
    checks = (first_step_leaves_dp_out, released_gradients_with_dp)
    return run_checks({check.__name__: partial(check) for check in checks})


@pytest.fixture(scope="module")
def two():
    return launch(worker_of_two, 2)


@pytest.fixture(scope="module")
def four():
    return launch(worker_of_four, 4)


def test_the_first_step_is_not_summed_over_dp(four):
    assert outcome_of(four, "first_step_leaves_dp_out") == [[False, True]] * 4


def test_released_gradients_fail_with_dp(four):
    # They fail in the second step; fleet does not sum the first one over dp.
    (name,) = set(outcome_of(four, "released_gradients_with_dp"))
    assert name == "AssertionError"


def test_cleared_gradients_are_reduced_no_more(two):
    assert outcome_of(two, "cleared_gradients_leave_the_buffer") == [[True, False]] * 2


def test_reductions_beside_the_backward_pass_need_every_gradient(two):
    assert outcome_of(two, "overlap_without_a_gradient") == ["Task is not initialized."] * 2


def test_gathers_beside_the_forward_pass_need_every_layer_trained(two):
    assert outcome_of(two, "gather_overlap_with_a_frozen_layer") == ["KeyError"] * 2


def test_gradients_that_ranks_miss_are_mixed_up(two):
    # Fleet adds the ones of one weight to those of the other.
    assert outcome_of(two, "sums_of_what_is_there") == [[2.0, True], [True, 2.0]]
