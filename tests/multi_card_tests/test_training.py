"""Full training runs on several ranks, against the same run file and global batch on one device.

Guarantees, over every kind of parallelism and mixes of them, on micro-batches of different lengths,
with two images, with one and with none:

- loss, gradient norm, evaluation loss and every parameter after four optimizer steps are equal;
- a resumed run is bit-identical under the same topology;
- one rank continues what several saved, and so do several ranks in another topology;
- every rank writes a part of the checkpoint, and none writes all of it.

Adam divides a gradient by its size, which turns rounding noise of entries near zero into full
updates; a large epsilon damps them.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import paddle.distributed as dist
import pytest

from paddle_vl.checkpoint import writing
from paddle_vl.config.load import load_run_config
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_run import MODEL as TINY_MODEL
from tests.single_card_tests.train.tiny_run import write_records, write_tiny_run
from tests.support.finished_runs import (
    arrays_of,
    assert_close,
    assert_equal_runs,
)
from tests.support.launch import launch

SP = ("parallel.sequence_parallel=true", "data.pad_to_multiple_of=2")
PP = ("parallel.pp_degree=2",)
SHARDING = ("parallel.sharding_degree=2",)
OVERLAP = (
    "parallel.fleet.sharding_configs={comm_overlap: true, enable_fuse_optimizer_states: true}",
    "parallel.sharding_gather_overlap=true",
    "train.recompute=full",
)
STAGE_3 = "parallel.sharding_stage=3"
VIRTUAL = ("parallel.num_virtual_stages=2",)
# The same samples in twice as many micro-batches.
HALVES = ("train.gradient_accumulation_steps=8", "train.per_device_train_batch_size=2")
TOPOLOGIES = {
    "dp2": (2, ["parallel.dp_degree=2"]),
    "mp2": (2, ["parallel.mp_degree=2", "parallel.vision=replicate"]),
    # Recomputation repeats the collectives of a layer in the backward pass.
    "mp2 with sequence parallelism": (2, ["parallel.mp_degree=2", *SP, "train.recompute=full"]),
    "pp2": (2, [*PP, "parallel.pp_split=cost", "train.recompute=full"]),
    "pp2 dynamic": (2, [*PP, "parallel.pp_shapes=dynamic"]),
    "pp2 dualpipev": (2, [*PP, "parallel.pp_schedule=dualpipev"]),
    "sharding2 stage 1": (2, [*SHARDING, "parallel.sharding_stage=1"]),
    "sharding2 stage 1 with overlap": (2, [*SHARDING, *OVERLAP]),
    "sharding2 stage 2": (2, [*SHARDING, "parallel.sharding_stage=2", "train.recompute=full"]),
    "sharding2 stage 3": (2, [*SHARDING, STAGE_3]),
    "sharding2 stage 3, kept": (
        2,
        [*SHARDING, STAGE_3, "parallel.reshard_after_forward=false", "train.recompute=full"],
    ),
    "pp4 interleaved": (4, ["parallel.pp_degree=4", *VIRTUAL, *HALVES]),
    "mp2 pp2 with sequence parallelism": (4, ["parallel.mp_degree=2", *PP, *SP]),
    "sharding2 mp2": (
        4,
        ["parallel.mp_degree=2", *SHARDING, STAGE_3, *SP],
    ),
    "dp2 mp2": (4, ["parallel.dp_degree=2", "parallel.mp_degree=2", *SP]),
}
# Cases for machines with more than two cores.
HEAVY = {
    "sharding2 stage 2, reduced once": (
        2,
        [*SHARDING, "parallel.sharding_stage=2", "parallel.reduce_once_per_step=true"],
    ),
    "dp2 sharding2 stage 3, kept": (
        4,
        ["parallel.dp_degree=2", *SHARDING, STAGE_3, "parallel.reshard_after_forward=false"],
    ),
    "pp4": (4, ["parallel.pp_degree=4", "parallel.pp_split=cost"]),
    "pp3 interleaved": (3, ["parallel.pp_degree=3", *VIRTUAL, *HALVES]),
    "pp2 reserved": (2, [*PP, "parallel.pp_visual_rows=64"]),
    "pp4 fthenb": (4, ["parallel.pp_degree=4", *VIRTUAL, "parallel.pp_schedule=fthenb"]),
    "pp4 balanced memory": (
        4,
        ["parallel.pp_degree=4", *VIRTUAL, "parallel.pp_schedule=balanced_memory"],
    ),
    # As on GPUs.
    "mp2 pp2 with batched messages": (
        4,
        [
            "parallel.mp_degree=2",
            *PP,
            *SP,
            "parallel.fleet.pp_configs={use_batch_p2p_comm: true}",
        ],
    ),
    "mp2 pp2 dualpipev": (
        4,
        ["parallel.mp_degree=2", *PP, *SP, "parallel.pp_schedule=dualpipev"],
    ),
    "sharding2 pp2": (4, [*SHARDING, *PP]),
    "sharding2 pp2 dualpipev": (4, [*SHARDING, *PP, "parallel.pp_schedule=dualpipev"]),
    "sharding2 mp2 stage 1": (4, ["parallel.mp_degree=2", *SHARDING, *SP, *OVERLAP]),
    "dp2 sharding2 stage 1": (4, ["parallel.dp_degree=2", *SHARDING]),
    "dp2 sharding2 stage 2": (4, ["parallel.dp_degree=2", *SHARDING, "parallel.sharding_stage=2"]),
    "dp2 mp2 pp2": (8, ["parallel.dp_degree=2", "parallel.mp_degree=2", *PP, *SP]),
}
# The tower's three feature levels cross two boundaries of interleaved stages.
MODEL = TINY_MODEL | {
    "text_config": TINY_MODEL["text_config"] | {"num_hidden_layers": 8},
    "vision_config": TINY_MODEL["vision_config"]
    | {"depth": 3, "deepstack_visual_indexes": [0, 1, 2]},
}
# Samples of a micro-batch over all ranks.
GLOBAL_BATCH = 4


def train(run_file: str, output_dir: str, overrides: list[str]) -> None:
    config = load_run_config(run_file, [f"train.output_dir={output_dir}", *overrides])
    assert build_trainer(config).run() is None


def worker(run_file: str, output_dir: str, overrides: list[str]) -> None:
    """A full run, and one that continues its checkpoint of step 2 in another folder."""
    train(run_file, output_dir, overrides)
    resumed = Path(f"{output_dir}-resumed")
    if dist.get_rank() == 0:
        shutil.copytree(f"{output_dir}/checkpoint-2", resumed / "checkpoint-2")
    dist.barrier()
    train(run_file, str(resumed), [*overrides, "train.resume_from_checkpoint=auto"])


def worker_of_many_files(run_file: str, output_dir: str, overrides: list[str]) -> None:
    """A full run whose checkpoint files may be as small as a few kilobytes."""
    writing.MIN_SHARD_BYTES = 1 << 12
    train(run_file, output_dir, overrides)


def settings(num_data_parts: int) -> list[str]:
    return [f"train.per_device_train_batch_size={GLOBAL_BATCH // num_data_parts}"]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    """A run whose samples have two images, one or none, and different lengths."""
    path = write_tiny_run(tmp_path_factory.mktemp("run"), num_samples=24, model=MODEL)
    records = [json.loads(line) for line in path.with_name("train.jsonl").read_text().splitlines()]
    for number, record in enumerate(records):
        question = record["messages"][0]
        if number % 3 == 0:
            question["content"] = question["content"].replace("<image>", "Guess: ")
            record["images"] = []
        elif number % 3 == 1:
            question["content"] = "<image> and " + question["content"]
            record["images"] *= 2
    write_records(path.with_name("train.jsonl"), records)
    return path


def common(run_file: Path) -> list[str]:
    return [
        f"data.eval=[{run_file.with_name('test.jsonl')}]",
        "train.save_steps=2",
        "train.eval_steps=2",
        "train.adam_epsilon=1e-2",
        "train.weight_decay=0.1",
        "train.gradient_accumulation_steps=4",
        "train.per_device_eval_batch_size=1",
    ]


@pytest.fixture(scope="module")
def one_device(run_file, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("one") / "out"
    train(str(run_file), str(output_dir), [*common(run_file), *settings(1)])
    return output_dir


@pytest.fixture(
    scope="module",
    params=[*TOPOLOGIES, *(pytest.param(name, marks=pytest.mark.heavy) for name in HEAVY)],
)
def several(request, run_file, tmp_path_factory) -> Path:
    processes, overrides = (TOPOLOGIES | HEAVY)[request.param]
    output_dir = tmp_path_factory.mktemp("several") / "out"
    split = {"parallel.dp_degree=2", "parallel.sharding_degree=2"}
    parts = 2 ** len(split & set(overrides))
    overrides = [*common(run_file), *settings(parts), *overrides]
    launch(worker, processes, arguments=(str(run_file), str(output_dir), overrides))
    return output_dir


def test_every_step_and_every_parameter_equal_one_device(several, one_device):
    assert_equal_runs(several, one_device)


def test_a_resumed_run_is_bit_identical(several):
    found = arrays_of(Path(f"{several}-resumed") / "checkpoint-4")
    for key, array in arrays_of(several / "checkpoint-4").items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)


def test_one_process_continues_what_several_saved(several, one_device, run_file, tmp_path, request):
    shutil.copytree(several / "checkpoint-2", tmp_path / "checkpoint-2")
    _, topology = (TOPOLOGIES | HEAVY)[request.node.callspec.params["several"]]
    batches = [override for override in topology if override in HALVES]
    overrides = [*common(run_file), *settings(1), *batches, "train.resume_from_checkpoint=auto"]
    train(str(run_file), str(tmp_path), overrides)
    assert_close(arrays_of(tmp_path / "checkpoint-4"), arrays_of(one_device / "checkpoint-4"))


def test_another_topology_continues_what_all_processes_wrote(run_file, one_device, tmp_path):
    first, then = tmp_path / "first", tmp_path / "then"
    parts = ["parallel.mp_degree=2", *PP, *SP]
    launch(
        worker_of_many_files,
        4,
        arguments=(str(run_file), str(first), [*common(run_file), *settings(1), *parts]),
    )
    files = list((first / "checkpoint-2").glob("model-*-of-*.safetensors"))
    whole = sum(file.stat().st_size for file in files)
    assert len(files) >= 4
    assert max(file.stat().st_size for file in files) < whole / 2
    shutil.copytree(first / "checkpoint-2", then / "checkpoint-2")
    other = ["parallel.dp_degree=2", *SHARDING, STAGE_3, *settings(4)]
    other += ["train.resume_from_checkpoint=auto"]
    launch(
        worker_of_many_files, 4, arguments=(str(run_file), str(then), [*common(run_file), *other])
    )
    assert_close(arrays_of(then / "checkpoint-4"), arrays_of(one_device / "checkpoint-4"))


@pytest.mark.heavy
@pytest.mark.parametrize("frozen", ["model.language_model.*", "model.visual.*"])
@pytest.mark.parametrize("topology", [[*PP], [*SHARDING, STAGE_3]], ids=str)
def test_processes_with_nothing_to_train_keep_in_step(run_file, tmp_path, frozen, topology):
    """The ranks hold a frozen pipeline stage, or frozen sharding units."""
    one, two = tmp_path / "one", tmp_path / "two"
    frozen = f"model.freeze=['{frozen}']"
    train(str(run_file), str(one), [*common(run_file), *settings(1), frozen])
    parts = 2 if topology[0] in SHARDING else 1
    overrides = [*common(run_file), *settings(parts), *topology, frozen]
    launch(worker_of_many_files, 2, arguments=(str(run_file), str(two), overrides))
    assert_close(arrays_of(two / "checkpoint-4"), arrays_of(one / "checkpoint-4"))
