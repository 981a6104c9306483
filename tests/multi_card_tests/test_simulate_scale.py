"""The counts of `tools/simulate_scale.py` against those of real ranks.

Guarantees, of a step of a small model of other width, rows and inner sizes than the simulated steps
have: calls and bytes by operation and group, and the groups that a rank makes, equal the mean of
the real ranks of its pipeline stage, for dp, sharding stages 1 to 3, tensor and sequence
parallelism, pipelines and experts.
"""

import functools
import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from paddle_vl.config.load import load_run_config
from paddle_vl.parallel.recorder import record_collectives
from simulate_scale import simulate
from tests.support.launch import launch, outcome_of, run_checks

MODEL: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {
        "vocab_size": 256, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    },
    "vision_config": {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": 48, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
    },
    "image_token_id": 160, "video_token_id": 161,
    "vision_start_token_id": 162, "vision_end_token_id": 163,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MP = {"mp_degree": 2, "sequence_parallel": True}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "dp": {"dp_degree": 2},
        "stage 1": {"sharding_degree": 2},
        "stage 2": {"sharding_degree": 2, "sharding_stage": 2},
        "stage 3": {"sharding_degree": 2, "sharding_stage": 3},
        "sp": MP,
        "pp": {"pp_degree": 2},
    },
    4: {
        "sp, experts at stage 1": {**MP, "sharding_degree": 2, "ep_degree": 2},
        "sp, experts at stage 3": {
            **MP, "sharding_degree": 2, "ep_degree": 4, "sharding_stage": 3,
        },
        "dp around stage 1": {"dp_degree": 2, "sharding_degree": 2},
        "dp around stage 2": {"dp_degree": 2, "sharding_degree": 2, "sharding_stage": 2},
    },
    8: {"sp, pp, experts": {**MP, "pp_degree": 2, "sharding_degree": 2, "ep_degree": 4}},
}  # fmt: skip
HEAVY = (8,)


def run_of(folder: str, degrees: dict[str, Any]) -> Any:
    model = MODEL
    if "ep_degree" in degrees:
        model = MODEL | {
            "model_type": "qwen3_vl_moe",
            "text_config": MODEL["text_config"] | EXPERTS,
        }
    settings = {
        "model": {"config": model},
        "data": {
            "train": ["none"], "processor": "none", "max_length": 64, "pad_to_multiple_of": 2,
        },
        "parallel": degrees,
        "train": {
            "output_dir": "none", "max_steps": 1, "gradient_accumulation_steps": 2,
            "recompute": "full", "per_device_train_batch_size": 1,
        },
    }  # fmt: skip
    path = Path(folder) / f"run{os.environ['PADDLE_TRAINER_ID']}.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return load_run_config(path)


def real_step(folder: str, degrees: dict[str, Any]) -> tuple[int, list[Any]]:
    """This rank's stage, and its calls in a step."""
    from scale.small_step import SmallStep, family_and_model, token_rows

    config = run_of(folder, degrees)
    recipe, full = family_and_model(config)
    step = SmallStep(config, recipe, full, full)
    with record_collectives() as recording:
        step.take(token_rows(config))
    return step.topology.pp_rank, recording.calls


def real(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return run_checks({name: partial(real_step, folder, case) for name, case in cases.items()})


def predicted(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    checks = {name: partial(_predicted, folder, case) for name, case in cases.items()}
    return run_checks(checks)


def _predicted(folder: str, degrees: dict[str, Any]) -> dict[str, Any]:
    return simulate(run_of(folder, degrees))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Any:
    """Of real ranks and the simulation, by number of ranks."""

    @functools.cache
    def of(num_ranks: int) -> tuple[list[dict], list[dict]]:
        arguments = (str(tmp_path_factory.mktemp("runs")), CASES[num_ranks])
        there = launch(real, num_ranks, arguments=arguments, timeout=900)
        return there, launch(predicted, 1, arguments=arguments, timeout=900)

    return of


def mean(of_ranks: Sequence[Any]) -> dict[tuple[str, int], tuple[float, float]]:
    """Calls and bytes by operation and size of the group."""
    calls, sizes = Counter(), Counter()
    for each in of_ranks:
        for call in each:
            calls[call.kind, call.num_ranks] += 1
            sizes[call.kind, call.num_ranks] += call.num_bytes
    return {key: (calls[key] / len(of_ranks), sizes[key] / len(of_ranks)) for key in calls}


@pytest.mark.parametrize(
    ("num_ranks", "name"),
    [
        pytest.param(number, name, marks=pytest.mark.heavy if number in HEAVY else ())
        for number, cases in CASES.items()
        for name in cases
    ],
)
def test_counts_equal_those_of_real_ranks(outcomes, num_ranks, name):
    real_ranks, simulation = outcomes(num_ranks)
    there, [prediction] = outcome_of(real_ranks, name), outcome_of(simulation, name)
    assert prediction["ranks"] == num_ranks
    for stage in prediction["stages"]:
        found: dict[tuple, tuple] = {}
        for each in stage["calls"]:
            key = each["operation"], each["group"]
            calls, size = found.get(key, (0, 0))
            found[key] = calls + each["calls"], size + each["contributed"]
        assert found == mean([calls for number, calls in there if number == stage["stage"]])
