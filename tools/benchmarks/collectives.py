"""Collectives of one training step per topology: number and bytes, beside the expected numbers.

    python tools/benchmarks/collectives.py                 # all topologies, or the named ones:
    python tools/benchmarks/collectives.py dp2 "dp2 ep2"

Trains a small model on a few ranks for each topology, and records the collectives of rank 0 in each
phase of a step. Counts hold on any machine. Expected, for N layers, T token rows of width D, M
visual rows and G deepstack levels:

- every topology: before the forward one message between hosts with all counts; after the gradient
  reductions one all-reduce of loss and squared gradient norm; on logging steps one all-gather more
  (docs/step_overhead.md).
- mp: in the forward one all-reduce of [T, D] for the embedding and two per layer, three of [T] for
  the loss, and one all-gather of the visual rows; in the backward one all-reduce per
  column-parallel linear (two per layer and the head); one all-reduce of partial gradients.
- sequence parallelism: each of those all-reduces is a reduce-scatter and an all-gather; gradients
  are gathered once more after the embedding, and that of the visual rows is one all-reduce.
- dp: one all-reduce of all gradients per bucket, nothing in forward and backward.
- ep: per layer with experts one all-gather of sizes and two all-to-alls of rows in the forward, two
  all-to-alls in the backward.
- pp: per micro-batch and stage boundary one message of token rows forward, with level rows as long
  as a later layer adds them, and one back. With V virtual stages the first stage sends V
  forward and V - 1 backward, with dualpipev one each way. No shapes are sent.
- sharding, U units (decoder layers and vision blocks). Stage 1: one reduce-scatter of all gradients
  and one all-gather of all parameters per fleet buffer of 256 MiB (with dp one all-reduce more of
  the rank's shard). Stage 2: per micro-batch one reduce-scatter per unit in the backward and one of
  the rest, with `reduce_once_per_step` only in the last micro-batch; as many all-gathers after the
  update. Stage 3: all-gathers of each unit in forward and backward, of token table and head in the
  forward, and of the rest after the update; with `reshard_after_forward: false` each of them once.
"""

import argparse
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from harness import Result, Table, launch, parser, run
from turns import recorded_phases

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "dp2": {"dp_degree": 2},
    "mp2": {"mp_degree": 2},
    "mp2 with sequence parallelism": {"mp_degree": 2, "sequence_parallel": True},
    "pp2": {"pp_degree": 2},
    "pp4 interleaved": {"pp_degree": 4, "num_virtual_stages": 2},
    "pp4 fthenb": {"pp_degree": 4, "num_virtual_stages": 2, "pp_schedule": "fthenb"},
    "pp4 balanced memory": {
        "pp_degree": 4, "num_virtual_stages": 2, "pp_schedule": "balanced_memory",
    },
    "pp4 dualpipev": {"pp_degree": 4, "pp_schedule": "dualpipev"},
    "sharding2 stage 1": {"sharding_degree": 2},
    "sharding2 stage 2": {"sharding_degree": 2, "sharding_stage": 2},
    "sharding2 stage 2, reduced once": {
        "sharding_degree": 2, "sharding_stage": 2, "reduce_once_per_step": True,
    },
    "sharding2 stage 3": {"sharding_degree": 2, "sharding_stage": 3},
    "sharding2 stage 3, kept": {
        "sharding_degree": 2, "sharding_stage": 3, "reshard_after_forward": False,
    },
    "dp2 ep2": {"dp_degree": 2, "ep_degree": 2},
    "dp2 mp2 with sequence parallelism": {
        "dp_degree": 2, "mp_degree": 2, "sequence_parallel": True,
    },
}  # fmt: skip
AXES = ("dp_degree", "mp_degree", "pp_degree", "sharding_degree")
# Phases of a step, and their names here.
PHASES = {
    "agreement": "agreement",
    "forward": "forward",
    "bwd": "backward",
    "forward_bwd": "pipeline",
    "gradient_sum": "gradients",
    "unscale_clip": "loss and norm",
    "optim_step": "update",
}
LAYERS, DEPTH, WIDTH, ROWS = 8, 2, 64, 64
# Micro-batches: twice as many as the longest pipeline has stages.
MICRO_BATCHES = 8


def model_settings(degrees: dict[str, Any]) -> dict[str, Any]:
    """Values of a small Qwen3-VL, with experts where they are divided."""
    from paddle_vl.testing import tiny_qwen3_vl_config

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    text = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "intermediate_size": 96}
    text |= experts if "ep_degree" in degrees else {}
    return tiny_qwen3_vl_config(**text).to_dict()


def expected_calls(degrees: dict) -> dict[str, Counter]:
    """Collectives by kind and phase, from the list above."""
    calls = {phase: Counter() for phase in PHASES.values()}
    calls["agreement"].update(all_gather=1)
    calls["loss and norm"].update(all_reduce=1)
    sequence_parallel = degrees.get("sequence_parallel", False)
    if degrees.get("mp_degree", 1) > 1:
        forward, backward = calls["forward"], calls["backward"]
        # The embedding and the loss; the visual rows.
        forward.update(all_reduce=4, all_gather=1)
        begins, ends = 2 * LAYERS + 1, 2 * LAYERS
        if sequence_parallel:
            forward.update(all_gather=begins, reduce_scatter=ends)
            backward.update(reduce_scatter=begins, all_gather=ends + 1, all_reduce=1)
        else:
            forward.update(all_reduce=ends)
            backward.update(all_reduce=begins)
        calls["gradients"].update(all_reduce=1)
    if degrees.get("dp_degree", 1) > 1:
        calls["gradients"].update(all_reduce=1)
    if "ep_degree" in degrees:
        calls["forward"].update(all_gather=LAYERS, alltoall_single=2 * LAYERS)
        calls["backward"].update(alltoall_single=2 * LAYERS)
    if degrees.get("pp_degree", 1) > 1:
        virtual = degrees.get("num_virtual_stages", 1)
        is_v = degrees.get("pp_schedule") == "dualpipev"
        messages = (2 if is_v else 2 * virtual - 1) * MICRO_BATCHES
        calls["pipeline"].update(send=messages, recv=messages)
    if degrees.get("sharding_degree", 1) > 1:
        stage, units = degrees.get("sharding_stage", 1), LAYERS + DEPTH
        # Micro-batches that reduce, and those that gather in each pass.
        reducing = 1 if degrees.get("reduce_once_per_step") else MICRO_BATCHES
        gathering = MICRO_BATCHES if degrees.get("reshard_after_forward", True) else 1
        calls["update"].update(all_gather=1 + units if stage == 2 else 1)
        if stage == 1:
            calls["gradients"].update(reduce_scatter=1)
        else:
            # At stage 3 table and head go by themselves.
            others = 1 if stage == 2 else 3
            calls["backward"].update(reduce_scatter=(units + others) * reducing)
        if stage == 3:
            calls["forward"].update(all_gather=(units + 2) * gathering)
            if gathering > 1:
                calls["backward"].update(all_gather=units * gathering)
    return calls


def measure(degrees: dict[str, Any]) -> dict[str, Any]:
    """Collectives of one step on this rank."""
    from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from paddle_vl.batch.visual_index import host_visual_indices
    from paddle_vl.families.vlm.objective import VLBatchAdapter, VLLoss
    from paddle_vl.families.vlm.pipeline import VLStage, layer_costs
    from paddle_vl.families.vlm.recipe import model_shape
    from paddle_vl.families.vlm.settings import VLRun
    from paddle_vl.parallel.ranks import FleetRanks
    from paddle_vl.parallel.topology import initialize
    from paddle_vl.testing import Image, tiny_qwen3_vl_batch
    from paddle_vl.train.layout import Layout, parallel_degrees
    from paddle_vl.train.optimizer import Optimizer
    from paddle_vl.train.step import counted, train_step

    run_config = VLRun.model_validate(
        {
            "model": {"config": model_settings(degrees)},
            "data": {"train": ["none"], "processor": "none", "pad_to_multiple_of": 4},
            "parallel": degrees,
            "train": {"output_dir": "none", "gradient_accumulation_steps": MICRO_BATCHES},
        }
    )
    config = Qwen3VLConfig.from_dict(model_settings(degrees))
    topology = initialize(parallel_degrees(run_config))
    ranks = FleetRanks(topology)
    layout = Layout(run_config, topology, model_shape(config), layer_costs(config))
    placement = layout.placement()
    model = Qwen3VLForConditionalGeneration.from_config(config, placement)
    store = layout.parameter_store(model)
    runner = layout.runner(model, VLStage, ranks, VLLoss(), VLBatchAdapter())
    named = list(model.hf_named_parameters())
    optimizer = Optimizer(named, run_config.train, set(), store, placement.parameter_table)
    # Two samples with an image of 16 tokens each.
    sample = (*range(1, 9), Image(8, 8), *range(9, ROWS - 15))
    batch: dict[str, Any] = dict(tiny_qwen3_vl_batch(sample, sample))
    batch |= {"num_target_tokens": int((batch["labels"][:, 1:] != -100).sum())}
    if not topology.degrees.sequence_parallel:
        # They are of all rows; with sequence parallelism the model computes those of its shard.
        ids: Any = {
            "image_token_id": config.image_token_id,
            "video_token_id": config.video_token_id,
        }
        batch |= host_visual_indices(batch["input_ids"], num_image_rows=32, **ids)
    several = topology.degrees.pp_degree > 1 or topology.degrees.sharding_stage > 1
    micro_batches = [counted(batch, runner.adapter)] * (MICRO_BATCHES if several else 1)
    with recorded_phases() as recording:
        train_step(runner, optimizer, micro_batches, 1e-3, ranks)
    calls = [call._replace(phase=PHASES[call.phase]) for call in recording.calls]
    return {"calls": calls, "parameters": sum(p.size for p in model.parameters())}


def table(name: str, found: dict[str, Any], expected: dict[str, Counter]) -> Table:
    """Collectives of a topology by phase and kind."""
    counts, sizes = counted_calls(found), Counter()
    for phase, kind, _, num_bytes, *_ in found["calls"]:
        sizes[phase, kind] += num_bytes
    rows = [
        [f"{phase}: {kind}", str(counts[phase][kind]), str(expected[phase][kind]),
         f"{sizes[phase, kind] / 1024:.1f}"]
        for phase in PHASES.values()
        for kind in sorted(counts[phase] | expected[phase])
    ]  # fmt: skip
    note = f"{name}, {found['parameters']} parameters on rank 0."
    return Table(f"collectives {name}", [name, "calls", "expected", "KiB"], rows, note)


def counted_calls(found: dict[str, Any]) -> dict[str, Counter]:
    """Numbers of calls by phase and kind."""
    counts = {phase: Counter() for phase in PHASES.values()}
    for phase, kind, *_ in found["calls"]:
        counts[phase][kind] += 1
    return counts


def compare(options: argparse.Namespace, work: Path) -> Result:
    tables, found, is_good = [], {}, True
    for name in options.topologies or TOPOLOGIES:
        degrees = TOPOLOGIES[name]
        num_ranks = math.prod(value for key, value in degrees.items() if key in AXES)
        found[name] = launch(measure, work / "run", num_ranks, degrees=degrees)[0]
        expected = expected_calls(degrees)
        tables.append(table(name, found[name], expected))
        is_good &= counted_calls(found[name]) == expected
    return Result(tables, found, is_good=is_good)


def topology(name: str) -> str:
    """A name in `TOPOLOGIES`, as the type of an option."""
    if name not in TOPOLOGIES:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(TOPOLOGIES)}")
    return name


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument(
        "topologies",
        metavar="TOPOLOGY",
        nargs="*",
        type=topology,
        help=f"of {', '.join(TOPOLOGIES)} (default: all)",
    )
    sys.exit(run(made, compare))
