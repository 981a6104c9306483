"""Collectives that fleet itself issues, recorded and checked, in plain fleet on 2 ranks.

Fleet calls methods of process groups, not functions of paddle.distributed. Guarantees: the
collectives of its tensor- and sequence-parallel layers, its pipeline and its sharding optimizer are
recorded once each and in order, with ranks, bytes, dtype and shape; the check of collectives names
ranks that disagree inside a layer of fleet.
"""

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.distributed.fleet.base.topology as fleet_topology
import pytest
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu import mp_ops
from paddle.distributed.fleet.meta_parallel import PipelineLayer
from paddle.distributed.fleet.utils import sequence_parallel_utils as sp
from paddle.distributed.fleet.utils import tensor_fusion_helper

from paddle_vl.parallel.collective_check import check_collectives
from paddle_vl.parallel.gloo_fleet import install
from paddle_vl.parallel.recorder import Recording, record_collectives
from paddle_vl.testing import first_difference
from tests.support.launch import launch

ROWS, WIDTH = 6, 4
BOTH = (0, 1)


def start_fleet(**hybrid) -> None:
    install()
    # One launch has several topologies; without this, fleet keeps the first one.
    fleet_topology._HYBRID_PARALLEL_GROUP = None
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, **hybrid}
    strategy.hybrid_configs["sharding_configs"].split_param = True
    strategy.pipeline_configs = {"micro_batch_size": ROWS, "accumulate_steps": 2}
    strategy.tensor_parallel_configs = {"tensor_init_seed": 1}
    fleet.init(is_collective=True, strategy=strategy)


def run(layer, rows: int) -> None:
    x = paddle.ones([rows, WIDTH])
    x.stop_gradient = False
    layer(x).sum().backward()


def in_layers() -> tuple[dict[str, Recording], str]:
    start_fleet(mp_degree=2)
    group = fleet.get_hybrid_communicate_group().get_model_parallel_group()
    column = fleet.meta_parallel.ColumnParallelLinear(WIDTH, 8, gather_output=False)
    row = fleet.meta_parallel.RowParallelLinear(8, WIDTH, input_is_parallel=True)
    spread = sp.ColumnSequenceParallelLinear(WIDTH, 8, gather_output=False, has_bias=False)
    back = sp.RowSequenceParallelLinear(8, WIDTH, input_is_parallel=True, has_bias=False)
    acts = {
        "parallel": lambda: run(lambda x: row(column(x)), ROWS),
        "sequence parallel": lambda: run(lambda x: back(spread(x)), ROWS // 2),
        "cross entropy": lambda: mp_ops._c_softmax_with_cross_entropy(
            paddle.ones([ROWS, 8]), paddle.zeros([ROWS, 1], dtype="int64"), group
        ),
    }
    recordings = {}
    for name, act in acts.items():
        with record_collectives() as recordings[name]:
            act()
    with pytest.raises(RuntimeError) as raised, check_collectives(20):
        run(lambda x: back(spread(x)), 3 + dist.get_rank())
    return recordings, str(raised.value)


class Stages(PipelineLayer):
    def __init__(self):
        super().__init__([nn.Linear(WIDTH, WIDTH) for _ in range(2)], 2, loss_fn=nn.MSELoss())


def in_a_pipeline() -> list[Recording]:
    """Recordings of two steps of two micro-batches."""
    start_fleet(pp_degree=2)
    model = fleet.distributed_model(Stages())
    optimizer = fleet.distributed_optimizer(
        paddle.optimizer.SGD(0.1, parameters=model.parameters())
    )
    rows = paddle.ones([2 * ROWS, WIDTH])
    recordings = []
    for _ in range(2):
        with record_collectives() as recording:
            model.train_batch([rows, rows], optimizer)
        recordings.append(recording)
    return recordings


def in_sharding() -> Recording:
    start_fleet(sharding_degree=2)
    # Fleet knows the alignment of its buffers for accelerators only.
    vars(tensor_fusion_helper)["__current_device_type__"] = "gpu"
    model = nn.Linear(WIDTH, 8)
    optimizer = fleet.distributed_optimizer(
        paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    )
    inner = optimizer._inner_opt
    assert type(inner).__name__ == "DygraphShardingOptimizerV2"
    run(model, ROWS)
    with record_collectives() as recording:
        optimizer.step()
    return recording


def shown(recording: Recording) -> list[tuple]:
    return [(call.kind, call.ranks, call.num_bytes, call.dtype) for call in recording.calls]


def worker() -> tuple:
    return in_layers(), in_a_pipeline(), in_sharding()


@pytest.fixture(scope="module")
def outcomes():
    return launch(worker, 2)


@pytest.fixture(scope="module")
def layers(outcomes):
    return [of_rank[0] for of_rank in outcomes]


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        # All-reduce of the output rows, and of the gradients of the input rows.
        ("parallel", [("all_reduce", ROWS * WIDTH), ("all_reduce", ROWS * WIDTH)]),
        (
            "sequence parallel",
            [
                ("all_gather", ROWS // 2 * WIDTH),
                ("reduce_scatter", ROWS * WIDTH),
                ("all_gather", ROWS // 2 * WIDTH),
                ("reduce_scatter", ROWS * WIDTH),
            ],
        ),
        ("cross entropy", [("all_reduce", ROWS)] * 3),
    ],
)
def test_layers_are_recorded(layers, name, calls):
    recordings = [recordings[name] for recordings, _ in layers]
    for recording in recordings:
        assert shown(recording) == [(kind, BOTH, 4 * size, "float32") for kind, size in calls]
    assert first_difference([recording.calls for recording in recordings]) is None


def test_ranks_that_disagree_inside_of_a_layer_are_told(layers):
    for _, message in layers:
        assert message.startswith("collective 1 of ranks [0, 1]: the ranks are about to do diff")
        assert f"rank 0 all_gather of float32 [3, {WIDTH}], called from" in message
        assert f"rank 1 all_gather of float32 [4, {WIDTH}], called from" in message
        assert "multi_card_tests/test_fleet_traffic.py" in message


def test_a_pipeline_is_recorded(outcomes):
    recordings = [of_rank[1] for of_rank in outcomes]
    activations, gradients = (0, 1), (1, 0)
    for rank, (_, steady) in enumerate(recordings):
        calls = [call for call in shown(steady) if call[0] in ("send", "recv")]
        forward, backward = ("send", "recv") if rank == 0 else ("recv", "send")
        size = 4 * ROWS * WIDTH
        assert sorted(calls) == sorted(
            2 * [(forward, activations, size, "float32"), (backward, gradients, size, "float32")]
        )
    for step in range(2):
        assert first_difference([recording[step].calls for recording in recordings]) is None
    # In the first step shapes are sent before the messages.
    first, steady = recordings[0]
    assert len(first.calls) > len(steady.calls)


def test_a_sharding_optimizer_is_recorded(outcomes):
    recordings = [of_rank[2] for of_rank in outcomes]
    for recording in recordings:
        sent = {call.kind: call.num_bytes for call in recording.calls}
        assert len(sent) == len(recording.calls)
        # One buffer, with gaps that align parameters.
        assert sent["reduce_scatter"] == 2 * sent["all_gather"]
        assert sent["reduce_scatter"] >= 4 * np.prod([WIDTH + 1, 8])
    assert first_difference([recording.calls for recording in recordings]) is None
