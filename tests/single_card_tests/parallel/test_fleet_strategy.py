"""Options of fleet: which are passed through and which are refused."""

import re

import pytest

from paddle_vl.config.parallel_settings import FleetConfig
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.fleet_strategy import (
    effective_options,
    fleet_problems,
    fleet_strategy,
)

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


@pytest.mark.parametrize(
    ("section", "option", "value", "message"),
    [
        ("mp_configs", "mp_async_alreduce", True, "unknown.*nearest option is mp_async_allreduce"),
        ("mp_configs", "recompute_allgather", 1, "is 1; its type is bool"),
        ("mp_configs", "nccl_config", "x", "unknown"),
        ("pp_configs", "enable_dynamic_shape", True, "decided or ruled out by this package"),
        ("sharding_configs", "comm_buffer_size_MB", 2.5, "type is int"),
        ("sharding_configs", "comm_buffer_size_MB", 0, "must be at least 1"),
        ("sharding_configs", "split_param", False, "decided or ruled out"),
        ("sharding_configs", "comm_overlap", True, "with parallel.pp_degree 2"),
    ],
)
def test_what_is_unknown_mistyped_or_wrong_here_is_refused(section, option, value, message):
    (problem,) = problems(**{section: {option: value}})
    assert problem.startswith(f"parallel.fleet.{section}.{option} ")
    assert re.search(message, problem), problem


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mp_skip_c_identity": True}, "no effect without mp_async_allreduce"),
        ({"sp_async_reduce_scatter": True}, r"no effect without parallel\.sequence_parallel"),
        ({"mp_async_allreduce": True}, "set mp_skip_c_identity: true beside it"),
    ],
)
def test_an_overlap_that_cannot_run_or_does_nothing_is_refused(options, message):
    (problem,) = problems(ParallelDegrees(mp_degree=2), mp_configs=options)
    assert re.search(message, problem), problem
