"""PaddleFleet's layers with visual indices on several ranks, over Paddle's own pipeline engine.

Guarantees, on 4 ranks, against stand-ins for PaddleFleet (tests/support/paddlefleet_standin):

- sequence parallelism (mp 4): every rank's rows, and the gradients of the replicated embeddings and
  levels, equal one card's; one all-reduce sums the latter, whatever the number of levels, also on a
  rank without visual tokens;
- pipeline (pp 2 with mp 2, and pp 4) through `fleet.distributed_model` with micro-batches of all
  kinds, text between them: the same, when levels cross stages or pass through one.

One launch runs all checks.
"""

import numpy as np
import paddle
import paddle.distributed.fleet.base.topology as fleet_topology
import pytest
from paddle.distributed import fleet

from paddle_vl.parallel.gloo_fleet import install as install_gloo
from paddle_vl.parallel.recorder import record_collectives
from tests.support import paddlefleet_cases as cases
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.paddlefleet_standin import use_stand_in

RANKS = 4
PIPELINES = {"pp 2, mp 2": (2, 2), "pp 4": (4, 1)}


def start(pp: int, mp: int) -> None:
    """Fleet's groups for a topology; also the stand-in's."""
    fleet_topology._HYBRID_PARALLEL_GROUP = None
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        "pp_degree": pp,
        "mp_degree": mp,
        "pp_configs": {
            "use_batch_p2p_comm": False,
            "delay_scale_loss": True,
            "enable_partial_send_recv": False,
            "enable_dynamic_shape": True,
        },
    }
    strategy.pipeline_configs = {"accumulate_steps": len(cases.BATCHES), "micro_batch_size": 1}
    fleet.init(is_collective=True, strategy=strategy)
    from paddlefleet.parallel_state import set_tensor_model_parallel_group

    set_tensor_model_parallel_group(group())


def group():
    return fleet.get_hybrid_communicate_group().get_model_parallel_group()


def config(pp: int, mp: int):
    return cases.config(pipeline_model_parallel_size=pp, sequence_parallel=mp > 1)


def local_loss(hidden: paddle.Tensor, mp: int) -> paddle.Tensor:
    """This rank's part of `cases.weighted_sum`."""
    if mp == 1:
        return cases.weighted_sum(hidden)
    whole = cases.loss_weights()[: hidden.shape[1]].transpose([1, 0, 2])
    return (hidden * paddle.split(whole, mp)[group().rank]).sum()


def summed(gradient: np.ndarray | None) -> np.ndarray | None:
    """The gradient of a row-wise layer's weight: the sum over the ranks that share the rows."""
    if gradient is None or group().nranks == 1:
        return gradient
    total = paddle.to_tensor(gradient)
    paddle.distributed.all_reduce(total, group=group())
    return total.numpy()


def check_rows(hidden: np.ndarray, expected: np.ndarray, mp: int) -> None:
    if mp > 1:
        expected = np.split(expected.transpose(1, 0, 2), mp)[group().rank]
    np.testing.assert_allclose(hidden, expected, rtol=1e-6, atol=1e-6)


def sequence_parallel(name: str) -> None:
    expected, gradients = cases.literal(cases.config(), name)
    start(1, RANKS)
    model, made = cases.build(config(1, RANKS), indexed=True), cases.batch(name)
    with record_collectives() as recording:
        hidden = model(dict(made.dict_args))
        local_loss(hidden, RANKS).backward()
    kinds = [call.kind for call in recording.calls]
    assert kinds.count("all_gather") == 1, kinds
    assert kinds.count("all_reduce") == (name != "text"), kinds
    assert len(kinds) == 1 + (name != "text"), kinds
    check_rows(hidden.numpy(), expected, RANKS)
    found = cases.gradients(model, made)
    found |= {key: summed(found[key]) for key in found if "mlp" in key}
    cases.assert_same(found, gradients)


def pipeline(topology: str) -> None:
    pp, mp = PIPELINES[topology]
    expected = {name: cases.literal(cases.config(), name) for name in cases.BATCHES}
    start(pp, mp)
    outputs = []

    def loss(hidden, _):
        outputs.append(hidden.numpy())
        return local_loss(hidden, mp)

    model = cases.build(
        config(pp, mp), indexed=True, seg_method="layer:TransformerLayer|EmptyLayer", loss_fn=loss
    )
    engine = fleet.distributed_model(model)
    made = {name: cases.batch(name) for name in cases.BATCHES}
    engine.forward_backward_pipeline(iter([(dict(one.dict_args), None) for one in made.values()]))
    if engine.is_pipeline_last_stage():
        for hidden, (whole, _) in zip(outputs, expected.values(), strict=True):
            check_rows(hidden, whole, mp)
    if engine.is_pipeline_first_stage():
        for name, one in made.items():
            for leaf, tensor in one.leaves.items():
                np.testing.assert_allclose(
                    tensor.grad.numpy(), expected[name][1][leaf], rtol=2e-5, atol=2e-6
                )
    parameters = dict(model.named_parameters())
    assert parameters
    for key, parameter in parameters.items():
        # Every micro-batch adds its gradient.
        total = sum(gradients[key] for _, gradients in expected.values())
        gradient = parameter.grad.numpy()
        found = summed(gradient) if "mlp" in key else gradient
        np.testing.assert_allclose(found, total, rtol=2e-5, atol=1e-5, err_msg=key)


def worker() -> dict:
    assert install_gloo()
    use_stand_in()
    checks = {name: lambda name=name: sequence_parallel(name) for name in cases.BATCHES}
    checks |= {name: lambda name=name: pipeline(name) for name in PIPELINES}
    return run_checks(checks)


@pytest.fixture(scope="module")
def outcomes():
    return launch(worker, processes=RANKS)


@pytest.mark.parametrize("name", cases.BATCHES)
def test_sequence_parallel_rows_and_gradients_equal_one_cards(outcomes, name):
    outcome_of(outcomes, name)


@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline_stages_hand_the_levels_on(outcomes, name):
    outcome_of(outcomes, name)
