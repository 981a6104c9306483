"""Defects of fleet's tensor-parallel layers, in plain fleet.

If a test fails here, Paddle has fixed the defect, and its workaround can go.
"""

import paddle
import paddle.distributed as dist
import pytest
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import ColumnParallelLinear
from paddle.distributed.fleet.utils.sequence_parallel_utils import (
    ColumnSequenceParallelLinear,
    mark_as_sequence_parallel_parameter,
    register_sequence_parallel_allreduce_hooks,
)

from paddle_vl.parallel.gloo_fleet import install
from tests.support.launch import launch, outcome_of, run_checks, wait_for_ranks

pytestmark = pytest.mark.heavy


def start(world: int, **mp_configs: bool):
    install()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"mp_degree": 2, "dp_degree": world // 2, "mp_configs": mp_configs}
    strategy.tensor_parallel_configs = {"tensor_init_seed": 1}
    fleet.init(is_collective=True, strategy=strategy, log_level="WARNING")
    return fleet.get_hybrid_communicate_group().get_model_parallel_group()


def of_frozen_weight(layer_class, group) -> str:
    layer = layer_class(4, 4, has_bias=False, gather_output=False, mp_group=group)
    layer.weight.stop_gradient = True
    x = paddle.ones([4, 4])
    x.stop_gradient = False
    try:
        layer(x).sum().backward()
    except Exception as error:
        return str(error)
    return "runs"


def overlapping() -> dict:
    names = ("mp_async_allreduce", "mp_skip_c_identity", "sp_async_reduce_scatter")
    group = start(2, **dict.fromkeys(names, True))
    return run_checks(
        {
            layer.__name__: lambda layer=layer: of_frozen_weight(layer, group)
            for layer in (ColumnParallelLinear, ColumnSequenceParallelLinear)
        }
    )


@pytest.mark.parametrize("layer", ["ColumnParallelLinear", "ColumnSequenceParallelLinear"])
def test_overlapped_products_fail_with_a_frozen_weight(layer):
    """Workaround: `paddle_vl.parallel.split_layers` switches the overlap off for frozen weights."""
    for message in outcome_of(launch(overlapping, 2), layer):
        assert message != "runs"


def sum_of_hooks() -> float:
    """The gradient of a parameter that one of two micro-batches uses, like a vision tower's."""
    group = start(2)
    layer = paddle.nn.Linear(1, 1, bias_attr=False)
    mark_as_sequence_parallel_parameter(layer.weight)
    register_sequence_parallel_allreduce_hooks(layer, 2, False)
    layer(paddle.full([1, 1], 1.0 + group.rank)).sum().backward()
    return layer.weight.grad.item()


def test_hooks_count_backward_passes_and_leave_gradients_apart():
    """Workaround: `paddle_vl.parallel.collectives` all-reduces partial gradients once per step."""
    assert launch(sum_of_hooks, 2) == [1.0, 2.0]


def gathered_from_another_group(folder: str) -> list[float]:
    start(4)
    pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    own = pairs[dist.get_rank() % 2]
    layer = ColumnSequenceParallelLinear(1, 2, has_bias=False, gather_output=False, mp_group=own)
    layer.weight.set_value(paddle.ones([1, 1]))
    gathered = layer(paddle.full([1, 1], float(dist.get_rank()))).flatten().tolist()
    # A rank that ends while another still makes its group ends that one too.
    wait_for_ranks(folder, dist.get_rank(), range(4))
    return gathered


def test_sequence_parallel_layers_gather_over_fleets_group_whichever_is_given(tmp_path):
    """Workaround: `paddle_vl.parallel.tensor` refuses any other group."""
    gathered = launch(gathered_from_another_group, 4, arguments=[str(tmp_path)])
    assert gathered == [[0.0, 1.0]] * 2 + [[2.0, 3.0]] * 2
