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
    stage: int,
    width: int,
    on_host: int = 0,
) -> tuple[int, float]:
    """Peak bytes above those before the model was made, and the limit.

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
        return start_fleet(parameters, topology, elements, before)
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
    return peak, held.parameters + held.masters + (copies + on_host) * whole + SLACK


def start_fleet(
    parameters: Iterable[Tensor], topology: Topology, elements: ModelElements, before: int
) -> tuple[int, float]:
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
    return peak, max(held.total, while_moving) + padding + SLACK


def start_run(run_file: str, is_old: bool) -> tuple[int, float]:
    """The same for a full run up to its optimizer, whose state is sharded as it is made."""
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
    return peaks[0], held.parameters + held.masters + 4 * whole + SLACK


def largest(build: Callable[[], nn.Layer]) -> int:
    return max(parameter.size for parameter in build().parameters())


def differing(build: Callable[[], nn.Layer], group) -> list[str]:
    """Parameters at stage 3 that differ from those of a model materialized unsharded."""
    wanted = build()
    wanted.materialize_all()
    model = build()
    sharding = Sharding(model.materialize(), group, 3, [units_of(model)], model.tables)
    values = dict(wanted.named_parameters())
    return [
        name
        for name, parameter in model.named_parameters()
        if not np.array_equal(sharding.gathered_value(parameter).numpy(), values[name].numpy())
    ]


def worker(folder: str) -> dict:
    """Checks of the models of `builders`, sharded over 2 ranks."""
    run_file = f"{folder}/run/run.yaml"
    checks = {f"run {is_old}": partial(start_run, run_file, is_old) for is_old in (False, True)}
    outcomes = run_checks(checks)
    topology, checks = initialize(ParallelDegrees(sharding_degree=2)), {}
    group = topology.sharding_group
    for dtype, width in DTYPES.items():
        for name, build in builders(Path(folder), dtype).items():
            whole = largest(build)
            for stage in STAGES:
                checks[f"{name} {dtype} {stage}"] = partial(
                    start, build, whole, topology, stage, width
                )
            checks[f"{name} {dtype} values"] = partial(differing, build, group)
    return outcomes | run_checks(checks)


def worker_of_parts(folder: str) -> dict:
    """Checks of matrices sharded over 2 mp ranks, each shard over 2 sharding ranks."""
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
            whole = largest(partial(make, dtype))
            # Fresh shards are cut from a full NumPy array.
            on_host = 4 if name.endswith("fresh") else 0
            split = partial(make, dtype, placement=FleetPlacement(topology.mp_group))
            for stage in STAGES_OF_PARTS[dtype]:
                checks[f"{name} {dtype} {stage}"] = partial(
                    start, split, whole, topology, stage, width, on_host=on_host
                )
            checks[f"{name} {dtype} values"] = partial(differing, split, group)
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


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_no_rank_holds_more_than_its_share_and_a_tensor(outcomes, name, dtype, stage):
    for peak, allowed in outcome_of(outcomes, f"{name} {dtype} {stage}"):
        assert peak <= allowed


def test_a_run_starts_like_that(outcomes):
    for peak, allowed in outcome_of(outcomes, "run False"):
        assert peak <= allowed
    for peak, allowed in outcome_of(outcomes, "run True"):
        assert peak > allowed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_those_of_a_whole_model(outcomes, name, dtype):
    assert outcome_of(outcomes, f"{name} {dtype} values") == [[], []]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("dtype", "stage"), [(dtype, stage) for dtype, of in STAGES_OF_PARTS.items() for stage in of]
)
@pytest.mark.parametrize("name", SPLIT)
def test_parts_of_matrices_need_no_more_either(outcomes_of_parts, name, dtype, stage):
    for peak, allowed in outcome_of(outcomes_of_parts, f"{name} {dtype} {stage}"):
        assert peak <= allowed


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPLIT)
def test_parts_of_matrices_are_those_of_a_whole_model(outcomes_of_parts, name, dtype):
    assert outcome_of(outcomes_of_parts, f"{name} {dtype} values") == [[]] * 4
