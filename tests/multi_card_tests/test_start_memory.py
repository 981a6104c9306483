"""Peak memory at the start of a run, in bytes, on ranks that shard a model.

Guarantees: while parameters are materialized and sharded, memory never exceeds the rank's final
share plus the largest tensor (in a bfloat16 model, with its float32 copy). This holds for fresh
weights, weights from files, adapters (fresh and continued), frozen parameters, and tensor-parallel
shards, whose full tensor passes through host memory. A model that is materialized before it is
sharded exceeds the limit at stage 3. The weights equal one device's.

`tests/support/sharding_memory.py` computes the share.
"""

import gc
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from paddle import Tensor, nn
from paddle.base.core import (
    host_memory_stat_current_value,
    host_memory_stat_peak_value,
    host_memory_stat_reset_peak_value,
)

from paddle_vl.checkpoint.reading import Materializable
from paddle_vl.config.load import load_run_config
from paddle_vl.config.schema import TrainConfig
from paddle_vl.nn.linear import fused_columns
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.nn.parameter_table import ParameterTable
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.sharding import FleetSharding, Sharding
from paddle_vl.parallel.tensor import FleetPlacement
from paddle_vl.parallel.topology import Topology, initialize
from paddle_vl.train import build as run_building
from paddle_vl.train.optimizer import Optimizer
from tests.single_card_tests.train.tiny_run import MODEL as TINY_MODEL
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.sharding_memory import ModelElements, between_steps
from tests.support.small_families import (
    builders,
    pi07,
    qwen_files,
    qwen_fresh,
    units_of,
    write_qwen,
)

DTYPES = {"float32": 4, "bfloat16": 2}
STAGES = (0, 1, 2, 3)
STAGES_OF_PARTS = {"float32": (1, 2, 3), "bfloat16": (3,)}
NAMES = tuple(builders(Path(), "float32"))
SPLIT = ("qwen fresh", "qwen files", "pi07 fresh", "pi07 files")
MODEL = TINY_MODEL | {
    "text_config": TINY_MODEL["text_config"]
    | {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 8},
    "vision_config": TINY_MODEL["vision_config"] | {"out_hidden_size": 64},
}
# For buffers, and for the zeros that pad shards.
SLACK = 1 << 10


def start(
    build: Callable[[], nn.Layer],
    whole: int,
    topology: Topology,
    *,
    stage: int,
    width: int,
    on_host: int = 0,
) -> None:
    """Assert a limit of the peak above what was held before the model was made.

    Args:
        whole: elements of the largest tensor.
        on_host: bytes per element of a NumPy array, which also counts as Paddle's memory on a CPU.
    """
    gc.collect()
    before = host_memory_stat_current_value("Allocated", 0)
    host_memory_stat_reset_peak_value("Allocated", 0)
    model = build()
    units = units_of(model)
    elements = ModelElements.of(model.parameters(), units, width, model.tables)
    parameters: Iterable[Tensor] = model.materialize()
    group = topology.sharding_group
    if stage == 1:
        start_fleet(parameters, topology, elements, before)
        return
    if stage:
        trained = Sharding(parameters, group, stage, [units], model.tables)
    else:
        trained = MasterWeights(parameters)
    peak = host_memory_stat_peak_value("Allocated", 0) - before
    held = between_steps(elements, stage, group.nranks)
    assert trained.stage == stage
    after = host_memory_stat_current_value("Allocated", 0) - before
    assert after <= held.parameters + held.masters + SLACK
    copies = width if width == 4 else width + 4
    assert peak <= held.parameters + held.masters + (copies + on_host) * whole + SLACK


def start_fleet(
    parameters: Iterable[Tensor], topology: Topology, elements: ModelElements, before: int
) -> None:
    """The same at stage 1 with its optimizer. Fleet moves parameters into buffers one by one."""
    parameters, table = list(parameters), ParameterTable()
    table.add(parameters)
    store = FleetSharding(parameters, topology, table)
    named = [(p.name, p) for p in parameters if not p.stop_gradient]
    train = TrainConfig(output_dir="unused", learning_rate=1.0)
    optimizer = Optimizer(named, train, set(), store, table)
    peak = host_memory_stat_peak_value("Allocated", 0) - before
    after = host_memory_stat_current_value("Allocated", 0) - before
    assert optimizer.tensors
    ranks = topology.sharding_group.nranks
    held = between_steps(elements, 1, ranks)
    # Fleet pads each parameter to 256 bytes on every rank, in all that it shards.
    width = elements.item_bytes
    padding = len(named) * 256 * ranks // width * (width + 4 + 12 / ranks)
    # Parameters exist twice while they move into a buffer of at most 256 MiB.
    buffer = width * (elements.units.trained + elements.root.trained)
    assert after <= held.total + padding + SLACK
    while_moving = held.parameters + held.gradients + buffer
    assert peak <= max(held.total, while_moving) + padding + SLACK


def start_run(run_file: str, is_old: bool) -> None:
    """The same for a full run up to its optimizer, whose state is sharded as it is made; more than
    the limit if parameters are materialized before they are sharded."""
    config = load_run_config(run_file, ["parallel.sharding_degree=2", "parallel.sharding_stage=3"])
    gc.collect()
    peaks: list[int] = []
    before = host_memory_stat_current_value("Allocated", 0)

    def optimizer(*arguments):
        peaks.append(host_memory_stat_peak_value("Allocated", 0) - before)
        return Optimizer(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_building, "Optimizer", optimizer)
        if is_old:
            materialize = Materializable.materialize
            patch.setattr(Materializable, "materialize", lambda model: list(materialize(model)))
        host_memory_stat_reset_peak_value("Allocated", 0)
        model = run_building.build_trainer(config, writes=False).runner.model
    elements = ModelElements.of(model.parameters(), units_of(model), 4, model.tables)
    held = between_steps(elements, 3, 2)
    # A fused weight is concatenated from its linears.
    whole = max(p.size * (2 if fused_columns(p) else 1) for p in model.parameters())
    limit = held.parameters + held.masters + 4 * whole + SLACK
    assert (peaks[0] > limit) == is_old


def largest(build: Callable[[], nn.Layer]) -> int:
    return max(parameter.size for parameter in build().parameters())


def same_weights(build: Callable[[], nn.Layer], group) -> None:
    """Parameters at stage 3 are those of a model materialized unsharded."""
    wanted = build()
    wanted.materialize_all()
    model = build()
    sharding = Sharding(model.materialize(), group, 3, [units_of(model)], model.tables)
    values = dict(wanted.named_parameters())
    for name, parameter in model.named_parameters():
        found = sharding.gathered_value(parameter).numpy()
        np.testing.assert_array_equal(found, values[name].numpy(), err_msg=name)


# Names of checks on two ranks, and of matrices sharded over 2 mp ranks, each shard over 2 sharding
# ranks.
CASES = ["run", "old run"]
CASES += [f"{n} {dtype} {what}" for n in NAMES for dtype in DTYPES for what in (*STAGES, "values")]
CASES_OF_PARTS = [
    f"{name} {dtype} {what}"
    for name in SPLIT
    for dtype, stages in STAGES_OF_PARTS.items()
    for what in (*stages, "values")
]


def worker(folder: str) -> dict:
    run_file = f"{folder}/run/run.yaml"
    checks = {
        "run": partial(start_run, run_file, False),
        "old run": partial(start_run, run_file, True),
    }
    outcomes = run_checks(checks)
    topology, checks = initialize(ParallelDegrees(sharding_degree=2)), {}
    for dtype, width in DTYPES.items():
        for name, build in builders(Path(folder), dtype).items():
            of_stage = partial(start, build, largest(build), topology, width=width)
            for stage in STAGES:
                checks[f"{name} {dtype} {stage}"] = partial(of_stage, stage=stage)
            checks[f"{name} {dtype} values"] = partial(same_weights, build, topology.sharding_group)
    return outcomes | run_checks(checks)


def worker_of_parts(folder: str) -> dict:
    topology = initialize(ParallelDegrees(mp_degree=2, sharding_degree=2))
    group, checks = topology.sharding_group, {}
    makers = {
        "qwen fresh": qwen_fresh,
        "qwen files": partial(qwen_files, Path(folder)),
        "pi07 fresh": pi07,
        "pi07 files": partial(pi07, is_fresh=False),
    }
    for dtype, width in DTYPES.items():
        for name, make in makers.items():
            # Fresh shards are cut from a full NumPy array.
            on_host = 4 if name.endswith("fresh") else 0
            split = partial(make, dtype, placement=FleetPlacement(topology.mp_group))
            whole = largest(partial(make, dtype))
            of_stage = partial(start, split, whole, topology, width=width, on_host=on_host)
            for stage in STAGES_OF_PARTS[dtype]:
                checks[f"{name} {dtype} {stage}"] = partial(of_stage, stage=stage)
            checks[f"{name} {dtype} values"] = partial(same_weights, split, group)
    return run_checks(checks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("weights")
    write_qwen(path)
    write_tiny_run(path / "run", model=MODEL)
    return str(path)


@pytest.fixture(scope="module")
def outcomes(folder):
    return launch(worker, 2, arguments=(folder,), timeout=300)


@pytest.fixture(scope="module")
def outcomes_of_parts(folder):
    return launch(worker_of_parts, 4, arguments=(folder,), timeout=300)


@pytest.mark.parametrize("case", CASES)
def test_a_start_needs_its_share_and_a_tensor_for_the_same_weights(outcomes, case):
    outcome_of(outcomes, case)


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES_OF_PARTS)
def test_parts_of_matrices_need_no_more(outcomes_of_parts, case):
    outcome_of(outcomes_of_parts, case)
