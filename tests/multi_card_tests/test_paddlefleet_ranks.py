"""PaddleFleet's layers with visual indices on several ranks, over Paddle's own pipeline engine.

Guarantees, on 4 ranks, against stand-ins for PaddleFleet of today and of 0.3
(tests/support/paddlefleet_standin):

- sequence parallelism (mp 4): every rank's rows, and the gradients of the replicated embeddings and
  levels, equal one card's; one all-reduce sums the latter, whatever the number of levels, also on a
  rank without visual tokens; today it has the levels alone;
- multi-token prediction with images under it: the published numbers, to the bit;
- pipeline (pp 2 with mp 2, and pp 4) through `fleet.distributed_model` with micro-batches of all
  kinds, text between them: the same, when levels cross stages or pass through one.

One launch a version runs all checks.
"""

import importlib

import numpy as np
import paddle
import paddle.distributed.fleet.base.topology as fleet_topology
import pytest
from paddle.distributed import fleet

from paddle_vl.parallel.gloo_fleet import install as install_gloo
from paddle_vl.parallel.recorder import record_collectives
from tests.support import paddlefleet_cases as cases
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.paddlefleet_standin import VERSIONS, use_stand_in

RANKS = 4
MTP = ["images", "videos", "one sample", "all in one slice", "text"]
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
    if name != "text":
        tokens = sum(leaf.shape[0] for key, leaf in made.leaves.items() if key.endswith(" 0"))
        # The parent of 0.3 cuts the sequence before the rows of images are placed.
        sources = cases.LEVELS + (cases.stands_for() == "before")
        summed_rows = next(call.shape for call in recording.calls if call.kind == "all_reduce")
        assert summed_rows == (sources * tokens, cases.WIDTH)
    check_rows(hidden.numpy(), expected, RANKS)
    found = cases.gradients(model, made)
    found |= {key: summed(found[key]) for key in found if "mlp" in key}
    cases.assert_same(found, gradients)


def multi_token_prediction(name: str) -> None:
    start(1, RANKS)
    base = importlib.import_module("paddlefleet.transformer.transformer_layer").TransformerLayer
    depth = 2
    text = cases.config(sequence_parallel=True, num_nextn_predict_layers=depth, specific_layer=base)
    runs = []
    for indexed in (True, False):
        made = cases.batch(name, has_levels=False, num_more=depth)
        model = cases.build(text, indexed)
        hidden = model(dict(made.dict_args))
        (
            hidden * paddle.arange(hidden.size, dtype="float32").reshape(hidden.shape)
        ).sum().backward()
        runs.append((hidden.numpy(), cases.gradients(model, made)))
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    for key, gradient in runs[1][1].items():
        np.testing.assert_array_equal(runs[0][1][key], gradient, err_msg=key)


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


def worker(version: str) -> dict:
    assert install_gloo()
    use_stand_in(version)
    checks = {name: lambda name=name: sequence_parallel(name) for name in cases.BATCHES}
    checks |= {name: lambda name=name: pipeline(name) for name in PIPELINES}
    if version == "today":
        checks |= {f"MTP, {name}": lambda name=name: multi_token_prediction(name) for name in MTP}
    return run_checks(checks)


@pytest.fixture(scope="module", params=VERSIONS)
def outcomes(request):
    return launch(worker, processes=RANKS, arguments=[request.param])


@pytest.mark.parametrize("name", cases.BATCHES)
def test_sequence_parallel_rows_and_gradients_equal_one_cards(outcomes, name):
    outcome_of(outcomes, name)


@pytest.mark.parametrize("name", PIPELINES)
def test_pipeline_stages_hand_the_levels_on(outcomes, name):
    outcome_of(outcomes, name)


@pytest.mark.parametrize("name", MTP)
@pytest.mark.parametrize("outcomes", ["today"], indirect=True)
def test_multi_token_prediction_with_images_gives_the_published_numbers(outcomes, name):
    outcome_of(outcomes, f"MTP, {name}")
