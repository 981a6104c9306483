"""Options of fleet and overlaps: which are passed through, on, or refused."""

import re
import sys
from pathlib import Path

import pytest

from paddle_vl import processes
from paddle_vl.config.parallel_settings import CONNECTIONS, FleetConfig, launch_variables
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.fleet_strategy import (
    effective_options,
    fleet_problems,
    fleet_strategy,
    missing_variables,
    overlaps,
)
from paddle_vl.parallel.launcher import launch

PP = {"pp_degree": 4, "num_micro_batches": 8}
ALL = ParallelDegrees(
    mp_degree=2, pp_degree=2, sharding_degree=2, num_micro_batches=4, sequence_parallel=True
)


def problems(degrees=ALL, **options) -> list[str]:
    return list(fleet_problems(FleetConfig(**options), degrees))


def test_an_option_reaches_fleets_strategy_before_the_default_of_this_package():
    options = {
        "mp_configs": {"sp_async_reduce_scatter": True},
        "pp_configs": {"use_batch_p2p_comm": True, "overlap_p2p_comm": True},
        "sharding_configs": {"enable_fuse_optimizer_states": True, "comm_buffer_size_MB": 64},
    }
    assert problems(**options) == []
    found = effective_options(fleet_strategy(ALL, FleetConfig(**options)))
    for section, values in options.items():
        assert values.items() <= found[section].items()


def test_defaults_are_those_that_are_right_here():
    found = effective_options(fleet_strategy(ALL))
    assert found["pp_configs"]["delay_scale_loss"]
    assert not found["pp_configs"]["use_batch_p2p_comm"]
    assert found["sharding_configs"]["split_param"]
    assert found["sharding_configs"]["accumulate_steps"] == 4
    assert not fleet_strategy(ALL).pipeline_configs["enable_partial_send_recv"]


OF_MP: dict = {"mp_degree": 2}
FUSED = {"mp_async_allreduce": True, "mp_fused_linear_param_grad_add": True}
OVERLAP = {"sharding_configs": {"comm_overlap": True}}
REFUSED = [
    ({}, {"mp_configs": {"mp_async_alreduce": True}}, "unknown.*nearest option is mp_async_allr"),
    ({}, {"mp_configs": {"recompute_allgather": 1}}, "is 1; its type is bool"),
    ({}, {"mp_configs": {"nccl_config": "x"}}, "unknown"),
    ({}, {"pp_configs": {"enable_dynamic_shape": True}}, "decided or ruled out by this package"),
    ({}, {"sharding_configs": {"comm_buffer_size_MB": 2.5}}, "type is int"),
    ({}, {"sharding_configs": {"comm_buffer_size_MB": 0}}, "must be at least 1"),
    ({}, {"sharding_configs": {"split_param": False}}, "decided or ruled out"),
    (OF_MP, {"mp_configs": {"mp_skip_c_identity": True}}, "no effect without mp_async_allreduce"),
    (OF_MP, {"mp_configs": {"sp_async_reduce_scatter": True}}, r"without parallel\.sequence_para"),
    (
        OF_MP, {"mp_configs": {"mp_async_allreduce": True, "mp_skip_c_identity": False}},
        "a CPU lacks its kernel for mp_skip_c_identity: false",
    ),
    (
        {"sharding_degree": 2, "pp_schedule": "dualpipev", **PP}, OVERLAP,
        "but dualpipev computes gradients in two parts",
    ),
    (
        {"sharding_degree": 2, "mp_degree": 2}, {"mp_configs": FUSED, **OVERLAP},
        "but mp_fused_linear_param_grad_add passes its gradients",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "options", "message"), REFUSED)
def test_what_cannot_be_or_does_nothing_is_refused(settings, options, message):
    (problem,) = problems(ParallelDegrees(**settings) if settings else ALL, **options)
    assert problem.startswith("parallel.fleet.")
    assert re.search(message, problem), problem


# The topologies of the table in docs/parallelism.md.
TOPOLOGIES = {
    "dp": ParallelDegrees(dp_degree=2),
    "dp, pp, virtual stages": ParallelDegrees(dp_degree=2, **PP, num_virtual_stages=2),
    "mp": ParallelDegrees(mp_degree=2),
    "mp, sequence parallel": ParallelDegrees(mp_degree=2, sequence_parallel=True),
    "mp, sharding stage 3": ParallelDegrees(mp_degree=2, sharding_degree=2, sharding_stage=3),
    "pp": ParallelDegrees(**PP),
    "pp, virtual stages": ParallelDegrees(**PP, num_virtual_stages=2),
    "pp, virtual stages, fthenb": ParallelDegrees(**PP, num_virtual_stages=2, pp_schedule="fthenb"),
    "sharding stage 1": ParallelDegrees(sharding_degree=2),
    "sharding stage 1, pp": ParallelDegrees(sharding_degree=2, **PP),
    "dp, sharding stage 1": ParallelDegrees(dp_degree=2, sharding_degree=2),
    "dp, pp, colocated": ParallelDegrees(dp_degree=2, **PP, schedule="colocated"),
    "sharding stage 1, dualpipev": ParallelDegrees(
        sharding_degree=2, **PP, pp_schedule="dualpipev"
    ),
    "sharding stage 1, colocated": ParallelDegrees(sharding_degree=2, **PP, schedule="colocated"),
    "sharding stage 2": ParallelDegrees(sharding_degree=2, sharding_stage=2),
    "cp, sharding stage 3": ParallelDegrees(sharding_degree=2, cp_degree=2, sharding_stage=3),
    "cp by ulysses, sharding stage 3": ParallelDegrees(
        sharding_degree=2, cp_degree=2, cp_attention="ulysses", sharding_stage=3
    ),
    "sharding stage 1, mp, sequence parallel, pp, virtual stages": ParallelDegrees(
        sharding_degree=2, mp_degree=2, sequence_parallel=True, **PP, num_virtual_stages=2
    ),
}


def table() -> str:
    """The table of docs/parallelism.md: what is on with the launcher's variables on GPUs."""
    lines = ["| topologies | `" + CONNECTIONS + "` | on |", "| --- | --- | --- |"]
    found: dict[tuple[str, str], list[str]] = {}
    for name, degrees in TOPOLOGIES.items():
        variable = launch_variables(degrees).get(CONNECTIONS)
        chosen = overlaps(degrees, on_gpu=True, connections=variable or "not set")
        on = [f"`{option.split('.')[-1]}`" for option, each in chosen.items() if each.is_on]
        found.setdefault((variable or "as it is", ", ".join(on) or "none"), []).append(name)
    lines += [f"| {'; '.join(names)} | {cells[0]} | {cells[1]} |" for cells, names in found.items()]
    return "\n".join(lines)


def test_the_documented_table_is_that_of_the_function():
    text = (Path(__file__).parents[3] / "docs" / "parallelism.md").read_text(encoding="utf-8")
    assert table() in text, table()


@pytest.mark.parametrize(
    ("topology", "variable", "option", "reason"),
    [
        ("mp", "not set", "mp_async_allreduce", "CUDA_DEVICE_MAX_CONNECTIONS is not set, not 1"),
        ("mp", "8", "mp_async_allreduce", "CUDA_DEVICE_MAX_CONNECTIONS is 8, not 1"),
        ("mp", "8", "mp_skip_c_identity", "no effect without mp_async_allreduce"),
        ("mp", "1", "sp_async_reduce_scatter", "without parallel.sequence_parallel"),
        ("mp", "1", "mp_fused_linear_param_grad_add", "reductions behind backward exclude"),
        ("pp", "1", "overlap_p2p_comm", "for 1f1b with num_virtual_stages"),
        ("sharding stage 1, dualpipev", "1", "sharding_configs.comm_overlap", "in two parts"),
        ("sharding stage 2", "1", "sharding_configs.comm_overlap", "have their own overlap"),
        ("dp, sharding stage 1", "1", "dp_comm_overlap", "sharding sums over dp beside its own"),
        ("dp, pp, colocated", "1", "dp_comm_overlap", "sums an encoder's gradients"),
    ],
)
def test_what_is_off_has_a_reason(topology, variable, option, reason):
    chosen = overlaps(TOPOLOGIES[topology], on_gpu=True, connections=variable)
    (found,) = (each for name, each in chosen.items() if name.endswith(option))
    assert not found.is_on
    assert reason in found.reason


def test_a_runs_choice_is_kept_with_what_follows_from_it():
    options = FleetConfig(mp_configs={"mp_async_allreduce": False})
    chosen = overlaps(TOPOLOGIES["mp"], options, on_gpu=True, connections="1")
    assert not any(each.is_on for each in chosen.values())
    options = FleetConfig(
        mp_configs={"sp_async_reduce_scatter": True}, sharding_configs={"comm_overlap": False}
    )
    found = effective_options(fleet_strategy(ALL, options))
    assert found["mp_configs"]["sp_async_reduce_scatter"]
    # Kept rows are those of this rank then.
    assert found["mp_configs"]["recompute_allgather"]
    assert overlaps(ALL, gathers=True)["sharding_gather_overlap"].is_on
    # Gradients that no hook sees turn the default off.
    degrees = ParallelDegrees(sharding_degree=2, mp_degree=2)
    chosen = overlaps(degrees, FleetConfig(mp_configs=FUSED), on_gpu=True, connections="1")
    assert not chosen["sharding_configs.comm_overlap"].is_on
    for degrees in TOPOLOGIES.values():
        on_cpu = overlaps(degrees, on_gpu=False, connections="1")
        assert not any(each.is_on for each in on_cpu.values())


def test_a_missing_variable_is_told_on_gpus_only(monkeypatch):
    monkeypatch.delenv(CONNECTIONS, raising=False)
    assert missing_variables(TOPOLOGIES["mp"]) is None
    monkeypatch.setattr("paddle.get_device", lambda: "gpu:0")
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1 before fleetrun" in str(
        missing_variables(TOPOLOGIES["mp"])
    )
    assert missing_variables(TOPOLOGIES["mp, sharding stage 3"]) is None
    # The user's own value stays.
    monkeypatch.setenv(CONNECTIONS, "8")
    assert missing_variables(TOPOLOGIES["mp"]) is None


@pytest.mark.parametrize(("own", "wanted"), [(None, "1"), ("8", "8")])
def test_ranks_start_with_the_variable_unless_the_user_has_set_it(
    own, wanted, monkeypatch, tmp_path
):
    started = []

    def start_nothing(command, environment, output):
        started.append(environment[CONNECTIONS])
        return start([sys.executable, "-c", ""], environment, output)

    start = processes.start_process
    monkeypatch.setattr(processes, "start_process", start_nothing)
    monkeypatch.delenv(CONNECTIONS, raising=False)
    if own is not None:
        monkeypatch.setenv(CONNECTIONS, own)
    variables = launch_variables(TOPOLOGIES["mp"])
    assert launch([], 2, tmp_path, is_quiet=True, variables=variables) == 0
    assert started == [wanted] * 2
