"""The counts of `tools/simulate_scale.py` against those of real ranks.

Guarantees, of a step of a small model of other width, rows and inner sizes than the simulated steps
have: calls and bytes by operation and group, collectives and groups of the start equal the mean of
the real ranks of its pipeline stage, and the longest chain is that of all real ranks, for dp,
sharding stages 1 to 3, tensor and sequence parallelism, pipelines, experts, the colocated schedule,
and pi07's policy and planner. Stages idle as long as a pipeline fills and drains.
"""

import functools
import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from paddle.distributed import collective

from paddle_vl.config.load import load_run_config
from paddle_vl.parallel.recorder import Collective, record_collectives
from simulate_scale import simulate
from tests.single_card_tests.train.tiny_policy_run import MODEL as MODEL_OF_POLICY
from tests.single_card_tests.train.tiny_policy_run import PLANNER, write_tiny_policy_run
from tests.support.launch import launch, outcome_of, run_checks

MODEL: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {
        "vocab_size": 256, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}, "rope_theta": 1e6,
    },
    "vision_config": {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 4, "patch_size": 4,
        "out_hidden_size": 48, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
    },
    "image_token_id": 160, "video_token_id": 161,
    "vision_start_token_id": 162, "vision_end_token_id": 163,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MP = {"mp_degree": 2, "sequence_parallel": True}
TABLES: dict[str, Any] = MODEL | {
    "model_type": "qwen4_exp",
    "text_config": {
        "vocab_size": 256, "hidden_size": 48, "num_hidden_layers": 3,
        "layer_types": [f"{kind}_attention" for kind in ("linear", "full", "linear")],
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 4, "linear_value_head_dim": 6, "hc_count": 2, "hc_lowrank": 4,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
        "indexer_budget": 8, "indexer_compress_ratio": 4,
        "ple_layer_ids": [1, 3], "heads_per_ngram": 2, "ngram_vocab_size_base": 20,
        "make_ngram_vocab_size_divisible_by": 16, "eos_token_id": 5,
        "rope_theta": 1e7,
        "rope_parameters": {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    },
    "vision_config": MODEL["vision_config"] | {"deepstack_visual_indexes": []},
}  # fmt: skip
COLOCATED = {"pp_degree": 2, "schedule": "colocated"}
# By number of ranks and name: degrees of a vision-language model, of pi07's policy or its planner.
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "dp": {"dp_degree": 2},
        "stage 1": {"sharding_degree": 2},
        "stage 2": {"sharding_degree": 2, "sharding_stage": 2},
        "stage 3": {"sharding_degree": 2, "sharding_stage": 3},
        "cp": {"sharding_degree": 2, "cp_degree": 2},
        "cp by heads": {"sharding_degree": 2, "cp_degree": 2, "cp_attention": "ulysses"},
        "sp": MP,
        "tables": {"sharding_degree": 2, "sharding_stage": 3},
        "tables, sp": MP,
        "tables, pp": {"pp_degree": 2, "pp_split": "count"},
        "pp": {"pp_degree": 2, "pp_split": "count"},
        "colocated": COLOCATED,
        "pi07 mp": {"mp_degree": 2},
        "pi07 pp": {"pp_degree": 2},
        "pi07 colocated": COLOCATED,
        "planner stage 3": {"sharding_degree": 2, "sharding_stage": 3},
        "planner pp": {"pp_degree": 2},
    },
    4: {
        "sp, experts at stage 1": {**MP, "sharding_degree": 2, "ep_degree": 2},
        "sp, experts at stage 3": {
            **MP, "sharding_degree": 2, "ep_degree": 4, "sharding_stage": 3,
        },
        "sp, cp": {**MP, "sharding_degree": 2, "cp_degree": 2, "sharding_stage": 3},
        "dp around stage 1": {"dp_degree": 2, "sharding_degree": 2},
        "dp around stage 2": {"dp_degree": 2, "sharding_degree": 2, "sharding_stage": 2},
        "pp of 4": {"pp_degree": 4, "pp_split": "count"},
        "colocated, divided encoder": {
            **COLOCATED, "dp_degree": 2, "encoder": {"mp_degree": 2, "sharding_stage": 1},
        },
        "colocated, fan-out": {**COLOCATED, "dp_degree": 2, "encoder": {"mp_degree": 4}},
    },
    8: {"sp, pp, experts": {**MP, "pp_degree": 2, "sharding_degree": 2, "ep_degree": 4}},
}  # fmt: skip
HEAVY = (4, 8)


def run_of(folder: str, name: str, degrees: dict[str, Any]) -> Any:
    others = {"pi07": MODEL_OF_POLICY, "planner": PLANNER, "tables": TABLES, "tables,": TABLES}
    model: dict[str, Any] = others.get(name.split()[0], MODEL)
    if "ep_degree" in degrees:
        text = MODEL["text_config"] | EXPERTS
        model = MODEL | {"model_type": "qwen3_vl_moe", "text_config": text}
    # As many as a pipeline of four stages needs.
    number = 4 if degrees.get("pp_degree") == 4 else 2
    settings: dict[str, Any] = {
        "model": {"config": model},
        "parallel": degrees,
        "train": {
            "output_dir": "none", "max_steps": 1, "gradient_accumulation_steps": number,
            "recompute": "full", "per_device_train_batch_size": 1,
        },
    }  # fmt: skip
    if model in (MODEL, TABLES) or "ep_degree" in degrees:
        settings["data"] = {
            "train": ["none"], "processor": "none", "max_length": 64, "pad_to_multiple_of": 4,
        }  # fmt: skip
    else:
        settings["data"] = {"synthetic_samples": 1, "processor": f"{folder}/processor"}
        settings["train"]["per_device_train_batch_size"] = 3
    path = Path(folder) / f"run{os.environ['PADDLE_TRAINER_ID']}.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return load_run_config(path)


class Real(NamedTuple):
    """What a rank did."""

    stage: int
    start: int
    groups: list[int]
    calls: list[Collective]


def real_step(folder: str, name: str, degrees: dict[str, Any]) -> Real:
    from scale.families import sized_family
    from scale.small_step import SmallStep

    config = run_of(folder, name, degrees)
    family, known = sized_family(config), {*collective._group_map} - {0}
    with record_collectives() as start:
        step = SmallStep(config, family)
    made = [group for key, group in collective._group_map.items() if key not in known]
    # Those of one rank have no connection.
    made = [group for group in made if step.topology.rank in group.ranks and group.nranks > 1]
    with record_collectives() as recording:
        step.take(int(family.units))
    return Real(
        step.topology.pp_rank,
        len(start.calls),
        sorted(group.nranks for group in made),
        recording.calls,
    )


def predicted_step(folder: str, name: str, degrees: dict[str, Any]) -> dict[str, Any]:
    return simulate(run_of(folder, name, degrees))


def worker(folder: str, cases: dict[str, dict[str, Any]], is_real: bool) -> dict[str, Any]:
    step = real_step if is_real else predicted_step
    return run_checks({name: partial(step, folder, name, cases[name]) for name in cases})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Any:
    """Of real ranks and the simulation, by number of ranks."""

    @functools.cache
    def of(num_ranks: int) -> tuple[list[dict], list[dict]]:
        folder = tmp_path_factory.mktemp("runs")
        if num_ranks == 2:
            write_tiny_policy_run(folder)
        arguments = (str(folder), CASES[num_ranks])
        there = launch(worker, num_ranks, arguments=(*arguments, True), timeout=900)
        return there, launch(worker, 1, arguments=(*arguments, False), timeout=900)

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
        of_stage = [each for each in there if each.stage == stage["stage"]]
        wanted = mean([each.calls for each in of_stage])
        if name.startswith("tables"):
            # Of rows that are looked up twice one is sent.
            exchange = "alltoall_single", num_ranks
            assert found.get(exchange, (0, 0)) >= wanted.pop(exchange, (0, 0)), exchange
            found.pop(exchange, None)
        assert found == wanted
        assert stage["start_collectives"] == of_stage[0].start
        assert sorted(stage["groups"]) == of_stage[0].groups
    assert prediction["chain"] == longest_path([each.calls for each in there])


def longest_path(of_ranks: Sequence[Sequence[Collective]]) -> int:
    """Calls of all ranks on the longest path: a call follows the last ones of its ranks, and a
    receipt what its sender had done before it sent."""
    # Place of each call on each of its ranks, in the order of the calls of these ranks.
    places: dict[tuple, dict[int, list[int]]] = {}
    for rank, calls in enumerate(of_ranks):
        for place, call in enumerate(calls):
            places.setdefault((call.is_message, call.ranks), {}).setdefault(rank, []).append(place)

    @functools.cache
    def depth(rank: int, place: int) -> int:
        if place < 0:
            return 0
        call = of_ranks[rank][place]
        same = places[call.is_message, call.ranks]
        before = [depth(rank, place - 1)]
        if call.kind != "send":
            number = same[rank].index(place)
            before += [depth(other, own[number] - 1) for other, own in same.items()]
        return 1 + max(before)

    return max(depth(rank, len(calls) - 1) for rank, calls in enumerate(of_ranks))


@pytest.mark.parametrize(
    ("ranks", "name", "idle"),
    [
        (2, "pp", 1 / 3),
        (2, "dp", None),
        pytest.param(4, "pp of 4", 3 / 7, marks=pytest.mark.heavy),
    ],
)
def test_stages_idle_while_a_pipeline_fills_and_drains(outcomes, ranks, name, idle):
    """With p even stages and m micro-batches p - 1 of m + p - 1 passes; collectives take none."""
    [prediction] = outcome_of(outcomes(ranks)[1], name)
    assert prediction["idle"] == (idle and pytest.approx(idle))
