"""Defects of fleet's pipeline that `paddle_vl.parallel.pipeline` works around, in plain fleet.

If a test fails here, Paddle has fixed the defect, and its workaround can go:

- batched messages between stages mix rows of different mp ranks if the mp ranks of a stage hold
  different rows (`enable_partial_send_recv`, on by default);
- with dynamic shapes the list of shapes grows with every step, and its oldest entries are read;
- a frozen first stage waits for a gradient that no stage sends;
- all engines of a process share one list of hooks;
- every step broadcasts the loss to all stages and reads its dtype on the host;
- DualPipeV calls deep_ep even if it is not installed, and cannot evaluate.
"""

import threading
from functools import partial
from pathlib import Path

import paddle
import paddle.distributed as dist
import paddle.distributed.fleet.base.topology as fleet_topology
import pytest
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import PipelineLayer
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication

from paddle_vl.parallel.gloo_fleet import install
from paddle_vl.parallel.recorder import record_collectives
from paddle_vl.testing import record_host_reads
from tests.multi_card_tests.fleet_defects.gloo_patches import install_more
from tests.support.launch import launch, outcome_of, run_checks, wait_for_ranks

pytestmark = pytest.mark.heavy
ROWS, WIDTH, WAIT_SECONDS = 2, 4, 4.0


def start(micro_batches: int = 2, mp_degree: int = 1, **pp_configs) -> None:
    install()
    fleet_topology._HYBRID_PARALLEL_GROUP = None
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        "pp_degree": 2,
        "mp_degree": mp_degree,
        "pp_configs": {"use_batch_p2p_comm": False, "delay_scale_loss": True} | pp_configs,
    }
    strategy.pipeline_configs = {"accumulate_steps": micro_batches, "micro_batch_size": ROWS}
    fleet.init(is_collective=True, strategy=strategy)


def make_engine(layers: int = 2, **options):
    return fleet.distributed_model(
        PipelineLayer(
            [nn.Linear(WIDTH, WIDTH) for _ in range(layers)],
            num_stages=2,
            loss_fn=lambda out, label: (out - label).square().mean(),
            **options,
        )
    )


def data(micro_batches: int = 2):
    return iter([(paddle.ones([ROWS, WIDTH]), paddle.zeros([ROWS, WIDTH]))] * micro_batches * 2)


def different_rows() -> bool:
    """Whether rows arrive unchanged when each mp rank sends different ones."""
    start(mp_degree=2, use_batch_p2p_comm=True)
    install_more()
    make_engine()
    group = fleet.get_hybrid_communicate_group()
    helper = p2p_communication.P2pHelper()
    own = paddle.full([ROWS, WIDTH], float(group.get_model_parallel_rank()))
    if group.get_stage_id() == 0:
        helper.send_forward(own, pp_last_stage=False)
        return True
    return bool((helper.recv_forward(pp_first_stage=False) == own).all())


def kept_shapes() -> list[int]:
    start(enable_dynamic_shape=True)
    engine, lengths = make_engine(), []
    for _ in range(2):
        engine.forward_backward_pipeline(data())
        lengths.append(len(engine._p2p_helper._send_recv_meta_list))
    return lengths


def frozen_first_stage(folder: str) -> bool:
    """Whether a step ends on this stage; the first stage gets WAIT_SECONDS more than the last."""
    start()
    engine = make_engine()
    if engine.is_pipeline_first_stage():
        for parameter in engine.parameters():
            parameter.stop_gradient = True
    engine._broadcast_final_loss = lambda *_: None
    done = threading.Event()

    def run() -> None:
        engine.forward_backward_pipeline(data())
        done.set()

    threading.Thread(target=run, daemon=True).start()
    rank = dist.get_rank()
    if rank == 0:
        wait_for_ranks(folder, rank, [1])
        is_done = done.wait(WAIT_SECONDS)
    else:
        is_done = done.wait(60)
        wait_for_ranks(folder, rank, [])
    # A rank that ended would interrupt the other rank's wait.
    wait_for_ranks(Path(folder, "end"), rank, range(2))
    return is_done


def shared_hooks() -> bool:
    start()
    return make_engine().callbacks is make_engine().callbacks


def loss_to_all() -> tuple[int, int]:
    """Number of broadcasts of a step, and number of host reads."""
    start()
    engine = make_engine()
    engine.forward_backward_pipeline(data())
    with record_collectives() as recording, record_host_reads() as reads:
        engine.forward_backward_pipeline(data())
    return sum(call.kind == "broadcast" for call in recording.calls), len(reads)


def dualpipev() -> list[str]:
    """The error messages of its exchange and of its evaluation."""
    start(4, use_dualpipev=True)
    engine = make_engine(4, use_dualpipev=True)
    engine._reset_states()
    with pytest.raises(AttributeError) as exchange:
        engine._commit_and_wait_comm()
    with pytest.raises(TypeError) as evaluation:
        engine.eval_batch(data(4), compute_loss=True)
    return [str(exchange.value), str(evaluation.value)]


def worker(folder: str):
    checks = {
        "kept shapes": kept_shapes,
        "shared hooks": shared_hooks,
        "loss to all": loss_to_all,
        "dualpipev": dualpipev,
        # Last, because a stage is left waiting.
        "frozen": partial(frozen_first_stage, folder),
    }
    return run_checks(checks)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return launch(worker, 2, arguments=(str(tmp_path_factory.mktemp("ranks")),))


def test_parts_of_different_rows_are_sent_as_one():
    results = launch(different_rows, 4)
    assert results[2:] == [False, False]


def test_shapes_of_all_steps_are_kept(outcomes):
    for first, second in outcome_of(outcomes, "kept shapes"):
        assert second == 2 * first


def test_a_frozen_first_stage_waits_for_ever(outcomes):
    assert outcome_of(outcomes, "frozen") == [False, True]


def test_hooks_belong_to_all_engines(outcomes):
    assert outcome_of(outcomes, "shared hooks") == [True, True]


def test_the_loss_is_sent_to_all_and_read(outcomes):
    assert outcome_of(outcomes, "loss to all")[0] == (2, 1)


def test_dualpipev_needs_deep_ep_and_cannot_evaluate(outcomes):
    for exchange, evaluation in outcome_of(outcomes, "dualpipev"):
        assert "get_event_from_custom_stream" in exchange
        assert "missing 1 required positional argument: 'phase'" in evaluation
