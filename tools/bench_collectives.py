"""Collectives of one training step per topology: number and bytes, beside what theory gives.

    python tools/bench_collectives.py                 # all topologies, or those that are named:
    python tools/bench_collectives.py dp2 "dp2 ep2"

Starts a few processes of a small model for each topology and records what rank 0 sends in each
phase of a step. The counts hold on any machine. Theory, for N layers, T token rows of width D, M
visual rows of G + 1 levels:

- every topology: before the forward pass one message between hosts, with what all of them count;
  behind the gradients' sums one sum of the loss and the squared gradient norm; nothing else for
  metrics, but for one gather on logging steps (`bench_step_overhead.py`).
- mp: forward one sum of [T, D] for the embedding and two per layer, three of [T] for the loss, one
  gather of the visual rows; backward one sum per place where a split product begins (two per layer
  and the head); one sum of the gradients that come in parts.
- with sequence parallelism each of those sums is a reduce-scatter and a gather of the same rows,
  gradients are gathered once more behind the embedding, and that of the visual rows is one sum.
- dp: one sum of all gradients, bucket by bucket, and nothing in forward or backward.
- pp: one message of token rows, and level rows as long as a later layer adds them, per micro-batch
  and boundary, and one back; a first stage sends V forward and V - 1 backward with V virtual parts,
  in a V (dualpipev) one each way. No message has shapes: every stage knows them.
- sharding, U units (decoder layers and vision blocks): stage 1 one reduce-scatter of all gradients
  and one gather of all parameters, for each of fleet's buffers of 256 MiB (with dp one sum of the
  rank's part more); stage 2 in each micro-batch a reduce-scatter per unit in the
  backward pass and one for the rest, in the last micro-batch alone with `reduce_once_per_step`, and
  as many gathers after the update; stage 3 gathers each unit in the forward and in the backward
  pass instead, token table and head in the forward pass, and after the update the rest alone; with
  `reshard_after_forward: false` it gathers each of them once a step.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from step_counts import NO_PHASE, recorded_phases

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
# Of a step, and what they are called here.
PHASES = {
    "agreement": "agreement",
    "forward": "forward",
    "bwd": "backward",
    NO_PHASE: "pipeline",
    "gradient_sum": "gradients",
    "unscale_clip": "loss and norm",
    "optim_step": "update",
}
LAYERS, DEPTH, WIDTH, LEVELS, ROWS, VISUAL = 8, 2, 64, 2, 2 * 64, 2 * 16
# Of a pipeline twice its longest.
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
    """Number of each kind per phase, from the formulas above."""
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
    """Two samples, each with an image, as the collator makes them but for sequence parallelism."""
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


def measure(degrees: dict) -> None:
    """One process: a step, its collectives as a line of JSON on rank 0."""
    import paddle

    from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from paddle_vl.families.qwen3_vl.objective import VLBatchAdapter, VLLoss
    from paddle_vl.families.qwen3_vl.pipeline import Qwen3VLStage, layer_costs
    from paddle_vl.families.qwen3_vl.recipe import model_shape
    from paddle_vl.families.qwen3_vl.settings import Qwen3VLRun
    from paddle_vl.parallel.processes import FleetProcesses
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
    processes = FleetProcesses(topology)
    layout = Layout(run_config, topology, model_shape(config), layer_costs(config))
    placement = layout.placement()
    model = Qwen3VLForConditionalGeneration.from_config(config, placement)
    layout.prepare_training(model)
    store = layout.parameter_store(model)
    runner = layout.runner(model, Qwen3VLStage, processes, VLLoss(), VLBatchAdapter())
    named = list(model.hf_named_parameters())
    optimizer = Optimizer(named, run_config.train, set(), store, placement.parameter_table)
    batch = make_batch(config)
    if topology.degrees.sequence_parallel:
        # Those of all rows; the model computes its own.
        batch = {name: value for name, value in batch.items() if "indices" not in name}
    several = topology.degrees.pp_degree > 1 or topology.degrees.sharding_stage > 1
    num_batches = MICRO_BATCHES if several else 1
    micro_batches = [counted(batch, runner.adapter)] * num_batches
    with recorded_phases() as recording:
        train_step(runner, optimizer, micro_batches, 1e-3, processes)
    calls = [call._replace(phase=PHASES[call.phase]) for call in recording.calls]
    if topology.rank == 0:
        parameters = sum(int(np.prod(parameter.shape)) for parameter in model.parameters())
        print(json.dumps({"calls": calls, "parameters": parameters}), flush=True)
    paddle.distributed.barrier()
    # See paddle_vl.cli.main.run.
    os._exit(0)


def run(degrees: dict) -> dict:
    """Start the processes of a topology and return what rank 0 measured."""
    processes = math.prod(value for name, value in degrees.items() if name in AXES)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paddle.distributed.launch", "--log_dir", folder]
        command += ["--nproc_per_node", str(processes), __file__, json.dumps(degrees)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        log = (Path(folder) / "workerlog.0").read_text(encoding="utf-8")
    lines = [line for line in log.splitlines() if line.startswith('{"calls"')]
    if done.returncode or not lines:
        raise SystemExit(f"{degrees} failed:\n{log}")
    return json.loads(lines[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "topologies",
        metavar="TOPOLOGY",
        nargs="*",
        type=_topology,
        help=f"of {', '.join(TOPOLOGIES)} (default: all)",
    )
    return parser


def _topology(name: str) -> str:
    if name not in TOPOLOGIES:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(TOPOLOGIES)}")
    return name


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        measure(json.loads(sys.argv[1]))
        return 0
    options = _parser().parse_args()
    as_expected = True
    for name in options.topologies or TOPOLOGIES:
        degrees = TOPOLOGIES[name]
        found = run(degrees)
        expected = expected_calls(degrees)
        print(f"{name}  ({found['parameters']} parameters on a rank)")
        for phase in PHASES.values():
            calls = [call for call in found["calls"] if call[0] == phase]
            counts = Counter(call[1] for call in calls)
            as_expected &= counts == expected[phase]
            for kind in sorted(counts | expected[phase]):
                size = sum(call[3] for call in calls if call[1] == kind)
                theory = f"(theory {expected[phase][kind]:3d})"
                print(
                    f"  {phase:<13} {kind:<15} {counts[kind]:3d} {theory}  {size / 1024:10.1f} KiB"
                )
    return 0 if as_expected else 1


if __name__ == "__main__":
    sys.exit(main())
