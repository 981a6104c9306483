"""Fleet's pipeline with recomputation on CPU processes trains as one device does."""

import numpy as np
import paddle
import pytest
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer

from tests.multi_card_tests.gloo_checks.registry import (
    start_fleet,
    tensor,
)
from tests.support.launch import launch

WIDTH, ROWS, MICRO_BATCHES, STEPS = 4, 3, 4, 2


class Block(paddle.nn.Layer):
    """Counts its calls: recomputation calls it again in the backward pass."""

    calls = 0

    def __init__(self, number: int):
        super().__init__()
        self.linear = paddle.nn.Linear(WIDTH, WIDTH)
        generator = np.random.default_rng(number)
        self.linear.weight.set_value(generator.standard_normal((WIDTH, WIDTH)).astype("float32"))

    def forward(self, x):
        Block.calls += 1
        return paddle.tanh(self.linear(x))


def squared_error(output, target):
    return ((output - target) ** 2).mean()


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(9)
    shape = (STEPS, 2, MICRO_BATCHES * ROWS, WIDTH)
    return [tuple(pair) for pair in generator.standard_normal(shape).astype("float32")]


def pipeline_worker(batched: bool) -> tuple[list[float], int]:
    """Losses of a two-stage pipeline that recomputes, and the calls of this stage's two layers."""
    degrees = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 2}
    start_fleet(
        degrees | {"pp_configs": {"use_batch_p2p_comm": batched}},
        pipeline_configs={"accumulate_steps": MICRO_BATCHES, "micro_batch_size": ROWS},
    )
    hcg = fleet.get_hybrid_communicate_group()
    layers = PipelineLayer(
        [LayerDesc(Block, number) for number in range(4)],
        num_stages=2,
        loss_fn=squared_error,
        recompute_interval=1,
        recompute_ctx={"mp_group": hcg.get_model_parallel_group()},
    )
    model = fleet.distributed_model(layers)
    optimizer = fleet.distributed_optimizer(
        paddle.optimizer.SGD(0.1, parameters=layers.parameters())
    )
    data = [[tensor(x), tensor(y)] for x, y in batches()]
    return [model.train_batch(each, optimizer).item() for each in data], Block.calls


def losses_on_one_device() -> list[float]:
    model = paddle.nn.Sequential(*[Block(number) for number in range(4)])
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    losses = []
    for x, y in batches():
        loss = squared_error(model(tensor(x)), tensor(y))
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("batched", [False, True], ids=["one_by_one", "batched_messages"])
def test_pipeline_with_recomputation_trains_as_one_device(batched):
    results = launch(pipeline_worker, processes=2, arguments=[batched])
    expected = losses_on_one_device()
    assert expected[1] != expected[0]
    for losses, calls in results:
        np.testing.assert_allclose(losses, expected, rtol=1e-6)
        # The layer that gets the data itself has no gradient to give back and is not recomputed.
        assert calls > 2 * MICRO_BATCHES * STEPS
