"""Collectives of one training step per topology: number and bytes, beside the expected numbers.

    python tools/benchmarks/collectives.py                 # all topologies, or the named ones:
    python tools/benchmarks/collectives.py dp2 "dp2 ep2"

Trains a small model on a few ranks for each topology, and records the collectives of rank 0 in each
phase of a step. Counts hold on any machine. Expected, for N layers, T token rows of width D, M
visual rows and G deepstack levels:

- every topology: before the forward one message between hosts with all counts; after the gradient
  reductions one all-reduce of loss and squared gradient norm; on logging steps one all-gather more
  (`overhead.py`).
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
import json
import math
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from harness import Table, launch, leave, parser, show
from step_counts import recorded_phases

TOPOLOGIES = {
    "dp2": {"dp_degree": 2},
    "mp2": {"mp_degree": 2},
    "mp2 with sequence parallelism": {"mp_degree": 2, "sequence_parallel": True},
    "pp2": {"pp_degree": 2},
    "pp4 interleaved": {"pp_degree": 4, "num_virtual_stages": 2},
    "pp4 fthenb": {"pp_degree": 4, "num_virtual_stages": 2, "pp_schedule": "fthenb"},
    "pp4 balanced memory": {
        "pp_degree": 4,
        "num_virtual_stages": 2,
        "pp_schedule": "balanced_memory",
    },
    "pp4 dualpipev": {"pp_degree": 4, "pp_schedule": "dualpipev"},
    "sharding2 stage 1": {"sharding_degree": 2},
    "sharding2 stage 2": {"sharding_degree": 2, "sharding_stage": 2},
    "sharding2 stage 2, reduced once": {
        "sharding_degree": 2,
        "sharding_stage": 2,
        "reduce_once_per_step": True,
    },
    "sharding2 stage 3": {"sharding_degree": 2, "sharding_stage": 3},
    "sharding2 stage 3, kept": {
        "sharding_degree": 2,
        "sharding_stage": 3,
        "reshard_after_forward": False,
    },
    "dp2 ep2": {"dp_degree": 2, "ep_degree": 2},
    "dp2 mp2 with sequence parallelism": {
        "dp_degree": 2,
        "mp_degree": 2,
        "sequence_parallel": True,
    },
}
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
LAYERS, DEPTH, WIDTH, LEVELS, ROWS, VISUAL = 8, 2, 64, 2, 2 * 64, 2 * 16
# Micro-batches: twice as many as the longest pipeline has stages.
IMAGE, MICRO_BATCHES = 500, 8


def model_settings(degrees: dict) -> dict:
    text = {
        "vocab_size": 512, "hidden_size": WIDTH, "intermediate_size": 96,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "rope_scaling": {"mrope_section": [4, 2, 2]},
    }  # fmt: skip
    if "ep_degree" in degrees:
        text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    vision = {
        "depth": DEPTH, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
        "out_hidden_size": WIDTH, "num_position_embeddings": 64,
        "deepstack_visual_indexes": list(range(LEVELS)),
    }  # fmt: skip
    ids = {"image_token_id": IMAGE, "video_token_id": 501, "vision_start_token_id": 502}
    kind = "qwen3_vl_moe" if "ep_degree" in degrees else "qwen3_vl"
    configs = {"model_type": kind, "text_config": text, "vision_config": vision}
    return {**configs, "vision_end_token_id": 503, **ids}


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


def make_batch(config) -> dict:
    """Two samples with an image each, as the collator makes them without sequence parallelism."""
    from paddle_vl.batch.visual_index import host_visual_indices

    rng = np.random.default_rng(0)
    input_ids = rng.integers(0, 400, (2, ROWS // 2))
    input_ids[:, 8 : 8 + VISUAL // 2] = IMAGE
    indices = host_visual_indices(
        input_ids, image_token_id=IMAGE, video_token_id=501, num_image_rows=VISUAL
    )
    return indices | {
        "input_ids": input_ids,
        "attention_mask": np.ones_like(input_ids),
        "labels": input_ids,
        "pixel_values": rng.standard_normal((128, config.vision_config.patch_dim), np.float32),
        "image_grid_thw": np.array([[1, 8, 8]] * 2),
        "num_target_tokens": input_ids.size - len(input_ids),
    }


def measure(degrees: dict) -> dict[str, Any]:
    """Collectives of one step on this rank."""
    from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from paddle_vl.families.qwen3_vl.objective import VLBatchAdapter, VLLoss
    from paddle_vl.families.qwen3_vl.pipeline import Qwen3VLStage, layer_costs
    from paddle_vl.families.qwen3_vl.recipe import model_shape
    from paddle_vl.families.qwen3_vl.settings import Qwen3VLRun
    from paddle_vl.parallel.ranks import FleetRanks
    from paddle_vl.parallel.topology import initialize
    from paddle_vl.train.layout import Layout, parallel_degrees
    from paddle_vl.train.optimizer import Optimizer
    from paddle_vl.train.step import counted, train_step

    run_config = Qwen3VLRun.model_validate(
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
    runner = layout.runner(model, Qwen3VLStage, ranks, VLLoss(), VLBatchAdapter())
    named = list(model.hf_named_parameters())
    optimizer = Optimizer(named, run_config.train, set(), store, placement.parameter_table)
    batch = make_batch(config)
    if topology.degrees.sequence_parallel:
        # They are of all rows; the model computes those of its shard.
        batch = {name: value for name, value in batch.items() if "indices" not in name}
    several = topology.degrees.pp_degree > 1 or topology.degrees.sharding_stage > 1
    num_batches = MICRO_BATCHES if several else 1
    micro_batches = [counted(batch, runner.adapter)] * num_batches
    with recorded_phases() as recording:
        train_step(runner, optimizer, micro_batches, 1e-3, ranks)
    calls = [call._replace(phase=PHASES[call.phase]) for call in recording.calls]
    parameters = sum(int(np.prod(parameter.shape)) for parameter in model.parameters())
    return {"calls": calls, "parameters": parameters}


def table(name: str, found: dict[str, Any], expected: dict[str, Counter]) -> Table:
    """Collectives of a topology by phase and kind."""
    rows = []
    for phase in PHASES.values():
        calls = [call for call in found["calls"] if call[0] == phase]
        counts = Counter(call[1] for call in calls)
        for kind in sorted(counts | expected[phase]):
            size = sum(call[3] for call in calls if call[1] == kind)
            numbers = [str(counts[kind]), str(expected[phase][kind]), f"{size / 1024:.1f}"]
            rows.append([f"{phase}: {kind}", *numbers])
    note = f"{name}, {found['parameters']} parameters on rank 0."
    return Table(f"collectives {name}", [name, "calls", "expected", "KiB"], rows, note)


def main() -> int:
    made = parser(__doc__)
    made.add_argument(
        "topologies",
        metavar="TOPOLOGY",
        nargs="*",
        type=_topology,
        help=f"of {', '.join(TOPOLOGIES)} (default: all)",
    )
    made.add_argument("--worker", help=argparse.SUPPRESS)
    made.add_argument("--degrees", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.worker:
        leave(measure(json.loads(options.degrees)), Path(options.worker))
    tables, all_found, as_expected = [], {}, True
    with tempfile.TemporaryDirectory() as folder:
        for name in options.topologies or TOPOLOGIES:
            degrees = TOPOLOGIES[name]
            num_ranks = math.prod(value for key, value in degrees.items() if key in AXES)
            work = Path(folder) / name.replace(" ", "_")
            arguments = ["--worker", str(work), "--degrees", json.dumps(degrees)]
            try:
                found = launch(__file__, num_ranks, arguments, work)[0]
            except RuntimeError as error:
                print(f"collectives: {name} failed:\n{error}", file=sys.stderr)
                return 1
            expected = expected_calls(degrees)
            tables.append(table(name, found, expected))
            all_found[name] = found
            counts = {phase: Counter() for phase in PHASES.values()}
            for call in found["calls"]:
                counts[call[0]][call[1]] += 1
            as_expected &= counts == expected
    show(options, tables, all_found)
    return 0 if as_expected else 1


def _topology(name: str) -> str:
    if name not in TOPOLOGIES:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(TOPOLOGIES)}")
    return name


if __name__ == "__main__":
    sys.exit(main())
