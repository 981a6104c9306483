"""The calls of a step per topology, from the simulation of its first rank, against formulas.

Guarantees, for N layers, D tower layers, T token rows and U = N + D units, besides one message
between hosts with all counts before the forward pass, and one all-reduce of loss and squared
gradient norm after the gradient reductions:

- mp: in the forward pass one all-reduce of [T, width] for the embedding and two per layer, three of
  [T] for the loss, and one all-gather of the visual rows; in the backward pass one all-reduce per
  column-parallel linear (two per layer and the head); one all-reduce of partial gradients.
- sequence parallelism: each of those all-reduces is a reduce-scatter and an all-gather; gradients
  are gathered once more after the embedding, and that of the visual rows is one all-reduce.
- dp: one all-reduce of all gradients per bucket, nothing in forward and backward pass.
- ep: per layer one all-gather of sizes and two all-to-alls of rows in the forward pass,
  two all-to-alls in the backward pass.
- pp: per micro-batch and stage boundary one message of token rows forward, and one back. With V
  virtual stages the first stage sends V forward and V - 1 backward, with dualpipev one each way. No
  shapes are sent.
- sharding, stage 1: one reduce-scatter of all gradients and one all-gather of all parameters per
  fleet buffer of 256 MiB. Stage 2: per micro-batch one reduce-scatter per unit in the backward pass
  and one of the rest, with `reduce_once_per_step` only in the last micro-batch; as many all-gathers
  after the update. Stage 3: all-gathers of each unit in forward and backward pass, of token table
  and head in the forward pass, of the rest after the update; `reshard_after_forward: false` does
  each of them once.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import yaml

from paddle_vl.config.load import load_run_config
from paddle_vl.testing import tiny_qwen3_vl_config
from simulate_scale import simulate
from tests.support.launch import launch, outcome_of, run_checks

LAYERS, DEPTH, MICRO_BATCHES = 8, 2, 8
UNITS = LAYERS + DEPTH
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MP = {"mp_degree": 2}
STAGE_2, STAGE_3 = ({"sharding_degree": 2, "sharding_stage": stage} for stage in (2, 3))
OF_MP = {"all_reduce": 1 + 2 * LAYERS + 3 + 2 * LAYERS + 1 + 1, "all_gather": 1}
OF_SP = {
    "all_reduce": 1 + 3 + 1 + 1,
    "all_gather": 2 * LAYERS + 1 + 1 + 2 * LAYERS + 1,
    "reduce_scatter": 2 * LAYERS + 2 * LAYERS + 1,
}
OF_EP = {"all_gather": LAYERS, "alltoall_single": 4 * LAYERS, "all_reduce": 1}
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "dp": ({"dp_degree": 2}, {"all_reduce": 1}),
    "mp": (MP, OF_MP),
    "sp": (MP | {"sequence_parallel": True}, OF_SP),
    "ep": ({"dp_degree": 2, "ep_degree": 2}, OF_EP),
    "pp": ({"pp_degree": 2}, {"send": MICRO_BATCHES, "recv": MICRO_BATCHES}),
    **{
        f"pp, {schedule}": (
            {"pp_degree": 4, "num_virtual_stages": 2, "pp_schedule": schedule},
            {"send": 3 * MICRO_BATCHES, "recv": 3 * MICRO_BATCHES},
        )
        for schedule in ("1f1b", "fthenb", "balanced_memory")
    },
    "pp, dualpipev": (
        {"pp_degree": 4, "pp_schedule": "dualpipev"},
        {"send": 2 * MICRO_BATCHES, "recv": 2 * MICRO_BATCHES},
    ),
    "stage 1": ({"sharding_degree": 2}, {"reduce_scatter": 1, "all_gather": 1}),
    "stage 2": (
        STAGE_2, {"reduce_scatter": (UNITS + 1) * MICRO_BATCHES, "all_gather": 1 + UNITS},
    ),
    "stage 2, reduced once": (
        STAGE_2 | {"reduce_once_per_step": True},
        {"reduce_scatter": UNITS + 1, "all_gather": 1 + UNITS},
    ),
    "stage 3": (
        STAGE_3,
        {
            "reduce_scatter": (UNITS + 3) * MICRO_BATCHES,
            "all_gather": 1 + (2 * UNITS + 2) * MICRO_BATCHES,
        },
    ),
    "stage 3, kept": (
        STAGE_3 | {"reshard_after_forward": False},
        {"reduce_scatter": (UNITS + 3) * MICRO_BATCHES, "all_gather": 1 + UNITS + 2},
    ),
}  # fmt: skip


def calls_of(folder: str, degrees: Mapping[str, Any]) -> Counter[str]:
    experts = EXPERTS if "ep_degree" in degrees else {}
    config = tiny_qwen3_vl_config(num_hidden_layers=LAYERS, intermediate_size=96, **experts)
    several = degrees.keys() & {"pp_degree", "sharding_stage"}
    settings = {
        "model": {"config": config.to_dict()},
        "data": {"train": ["none"], "processor": "none", "pad_to_multiple_of": 4},
        "parallel": dict(degrees),
        "train": {
            "output_dir": "none", "max_steps": 1,
            "gradient_accumulation_steps": MICRO_BATCHES if several else 1,
        },
    }  # fmt: skip
    path = f"{folder}/run.yaml"
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump(settings, file)
    found = Counter()
    for each in simulate(load_run_config(path))["stages"][0]["calls"]:
        found[each["operation"]] += each["calls"]
    return found


def all_calls(folder: str) -> dict[str, Any]:
    return run_checks({name: partial(calls_of, folder, case[0]) for name, case in CASES.items()})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Any:
    return launch(all_calls, 1, arguments=(str(tmp_path_factory.mktemp("runs")),), timeout=900)


@pytest.mark.parametrize("name", CASES)
def test_calls_follow_the_formulas(outcomes, name):
    [found] = outcome_of(outcomes, name)
    assert found == Counter(all_gather=1, all_reduce=1) + Counter(CASES[name][1])
