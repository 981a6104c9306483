"""Full training runs of Qwen3-VL under the colocated schedule, against the same run on one device.

Guarantees, with more, as many and fewer encoder lanes than data lanes, on samples with two images,
one and none:

- loss, gradient norm, evaluation loss, every parameter and every moment after four optimizer steps
  are equal, with micro-batches fewer than, equal to and more than the stages;
- so they are with frozen parts, adapters, packed rows, experts with their balance loss, and steps
  without images;
- one rank's value that is not finite skips the update of both parts on all ranks;
- a resumed run is bit-identical, also where encoder and optimizer state are divided over all ranks;
- a plain run continues colocated, and a colocated one plain.

Adam divides a gradient by its size, which turns rounding noise of entries near zero into full
updates; a large epsilon damps them. `test_colocated_schedule` compares gradients themselves.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import paddle.distributed as dist
import paddle.distributed.fleet.base.topology as fleet_topology
import pytest

from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.config.load import load_run_config
from paddle_vl.testing import qwen3_vl
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_run import MODEL as TINY_MODEL
from tests.single_card_tests.train.tiny_run import write_records, write_tiny_run
from tests.support.finished_runs import arrays_of, assert_close, assert_equal_runs
from tests.support.launch import launch

COLOCATED = "parallel.schedule=colocated"
PP2, PP4 = "parallel.pp_degree=2", "parallel.pp_degree=4"
DP2, SHARDING2 = "parallel.dp_degree=2", "parallel.sharding_degree=2"
SP = ("parallel.mp_degree=2", "parallel.sequence_parallel=true", "data.pad_to_multiple_of=2")
STATE, RECOMPUTE = "parallel.encoder.sharding_stage=1", "train.recompute=full"
VIRTUAL = "parallel.num_virtual_stages=2"


def encoder_mp(degree: int) -> str:
    return f"parallel.encoder.mp_degree={degree}"


def micro_batches(count: int) -> list[str]:
    """The same 16 samples of a step in another number of micro-batches."""
    return [
        f"train.gradient_accumulation_steps={count}",
        f"train.per_device_train_batch_size={16 // count}",
    ]


TWO_ROWS = ["train.gradient_accumulation_steps=2", "train.per_device_train_batch_size=2"]
# Name -> overrides; one launch runs all layouts of a world size.
LAYOUTS = {
    2: {
        "pp2, encoder mp2": [PP2, encoder_mp(2), "parallel.encoder.offload_rows=true", RECOMPUTE],
        "pp2": [PP2, STATE, RECOMPUTE, *micro_batches(1)],
    },
    4: {
        "pp2 dp2": [PP2, DP2],
        "pp2 sharding2, encoder mp4": [PP2, SHARDING2, encoder_mp(4)],
        "pp2 mp2 with sequence parallelism, encoder mp2": [PP2, *SP, encoder_mp(2), STATE],
        "pp4 interleaved": [PP4, VIRTUAL, *micro_batches(8)],
    },
}
HEAVY = {
    2: {
        "pp2 dualpipev": [PP2, "parallel.pp_schedule=dualpipev", "parallel.pp_split=cost"],
        "pp2 dynamic": [PP2, "parallel.pp_shapes=dynamic"],
        "pp2 reserved": [PP2, "parallel.pp_visual_rows=64"],
    },
    4: {
        "pp2 dp2, encoder mp2": [PP2, DP2, encoder_mp(2), STATE],
        "pp2 dp2, encoder mp4": [PP2, DP2, encoder_mp(4), RECOMPUTE],
        "pp2 sharding2": [PP2, SHARDING2, STATE],
        "pp2 mp2": [PP2, "parallel.mp_degree=2"],
        "pp4, fewer micro-batches": [PP4, *micro_batches(2)],
        "pp4, encoder mp4": [PP4, encoder_mp(4)],
        "pp4 fthenb": [PP4, VIRTUAL, "parallel.pp_schedule=fthenb"],
    },
    8: {
        f"pp2 mp2 dp2, encoder mp{degree}": [PP2, *SP, DP2, encoder_mp(degree)]
        for degree in (1, 2, 4, 8)
    },
}
MODEL = TINY_MODEL | {
    "text_config": TINY_MODEL["text_config"] | {"num_hidden_layers": 8},
    "vision_config": TINY_MODEL["vision_config"]
    | {"hidden_size": 32, "num_heads": 8, "depth": 3, "deepstack_visual_indexes": [0, 1, 2]},
}
EXPERTS = MODEL | {
    "model_type": "qwen3_vl_moe",
    "text_config": MODEL["text_config"] | qwen3_vl.EXPERTS | {"output_router_logits": True},
}
# Other runs, each compared with one device: name -> overrides, layout on two ranks.
VARIANTS = {
    # The next step's images are encoded ahead.
    "frozen tower": (["model.freeze=[vision, mergers]"], [PP2]),
    "frozen decoder": (["model.freeze=[language]"], [PP2, STATE]),
    "frozen blocks, rate of the mergers": (
        ["model.freeze=['model.visual.blocks.*']", "train.part_learning_rates={mergers: 1e-3}"],
        [PP2, encoder_mp(2)],
    ),
    "packing": (["data.packing=true", "data.max_length=128", *TWO_ROWS], [PP2, STATE]),
    "adapters in the decoder and the divided tower": (
        [
            "model={pretrained: BASE, lora: {r: 2, target_modules: "
            "[q_proj, 'model.visual.blocks.*', 'model.visual.merger.*']}}"
        ],
        [PP2, encoder_mp(2)],
    ),
    "text only": (["data.train=[TEXT]"], [PP2, encoder_mp(2)]),
    "few images": (["data.train=[FEW]"], [PP2]),
    "experts": ([f"model.config={json.dumps(EXPERTS)}"], [PP2]),
}


def train(run_file: str, output_dir: Path, overrides: list[str]) -> None:
    # One launch runs several layouts; without this, fleet keeps the first one's strategy.
    fleet_topology._HYBRID_PARALLEL_GROUP = None
    config = load_run_config(run_file, [f"train.output_dir={output_dir}", *overrides])
    assert build_trainer(config).run() is None


def continue_run(run_file: str, start: Path, output_dir: Path, overrides: list[str]) -> None:
    """Continue a checkpoint of step 2 in another folder."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.copytree(start / "checkpoint-2", output_dir / "checkpoint-2")
    if dist.is_initialized():
        dist.barrier()
    train(run_file, output_dir, [*overrides, "train.resume_from_checkpoint=auto"])


def worker(run_file: str, folder: str, one_device: str, layouts: dict[str, list[str]]) -> None:
    """Every layout from the start and from its own checkpoint, the first from one device's too."""
    for name, overrides in layouts.items():
        out = Path(folder) / name
        train(run_file, out, overrides)
        dist.barrier()
        continue_run(run_file, out, Path(f"{out}-resumed"), overrides)
    name, overrides = next(iter(layouts.items()))
    continue_run(run_file, Path(one_device), Path(folder) / f"{name}-continued", overrides)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    """A run whose samples have two images, one or none, and different lengths."""
    path = write_tiny_run(tmp_path_factory.mktemp("run"), num_samples=64, model=MODEL)
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
    without = [record for record in records if not record["images"]]
    write_records(path.with_name("text.jsonl"), [*without, *without, *without])
    # The order of samples puts the only images into some of the steps.
    write_records(path.with_name("few.jsonl"), [*without, *without, *without, records[1]])
    return path


def common(run_file: Path) -> list[str]:
    return [
        f"data.eval=[{run_file.with_name('test.jsonl')}]",
        *("train.save_steps=2", "train.eval_steps=2", "train.adam_epsilon=1e-2"),
        *("train.weight_decay=0.1", "train.per_device_eval_batch_size=1"),
    ]


@pytest.fixture(scope="module")
def one_device(run_file, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("one") / "out"
    train(str(run_file), output_dir, [*common(run_file), *micro_batches(4)])
    return output_dir


def full_overrides(run_file: Path, layout: list[str]) -> list[str]:
    parts = 2 if {DP2, SHARDING2} & set(layout) else 1
    halves = [f"train.per_device_train_batch_size={4 // parts}"]
    return [*common(run_file), *micro_batches(4), *halves, COLOCATED, *layout]


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param((size, LAYOUTS), id=f"{size} ranks") for size in LAYOUTS),
        *(
            pytest.param((size, HEAVY), id=f"more on {size} ranks", marks=pytest.mark.heavy)
            for size in HEAVY
        ),
    ],
)
def runs(request, run_file, one_device, tmp_path_factory) -> dict[str, Path]:
    """Output folders of all layouts of a launch, by name."""
    (size, layouts), folder = request.param, tmp_path_factory.mktemp("several")
    every = {name: full_overrides(run_file, layout) for name, layout in layouts[size].items()}
    arguments = (str(run_file), str(folder), str(one_device), every)
    launch(worker, size, arguments=arguments, timeout=400)
    return {name: folder / name for name in every}


def test_every_step_and_every_parameter_equal_one_device(runs, one_device):
    for output_dir in runs.values():
        assert_equal_runs(output_dir, one_device)


def test_a_resumed_run_is_bit_identical(runs):
    for output_dir in runs.values():
        found = arrays_of(Path(f"{output_dir}-resumed") / "checkpoint-4")
        for key, array in arrays_of(output_dir / "checkpoint-4").items():
            np.testing.assert_array_equal(found[key], array, err_msg=f"{output_dir.name}: {key}")


def test_a_plain_run_continues_colocated_and_back(runs, run_file, one_device, tmp_path):
    expected = arrays_of(one_device / "checkpoint-4")
    first = next(iter(runs.values()))
    assert_close(arrays_of(Path(f"{first}-continued") / "checkpoint-4"), expected)
    overrides = [*common(run_file), *micro_batches(4)]
    continue_run(str(run_file), first, tmp_path / "plain", overrides)
    assert_close(arrays_of(tmp_path / "plain" / "checkpoint-4"), expected)


def worker_of_variants(
    run_file: str, folder: str, variants: dict[str, list[str]], of_guard: list[str]
) -> dict[str, list[bool]]:
    for name, overrides in variants.items():
        train(run_file, Path(folder) / name, overrides)
    return steps_of_a_guarded_run(run_file, of_guard)


def steps_of_a_guarded_run(run_file: str, overrides: list[str]) -> dict[str, list[bool]]:
    """Whether each of three steps is good and changes weights or moments; the second has a NaN in
    the last rank's encoder."""
    fleet_topology._HYBRID_PARALLEL_GROUP = None
    trainer = build_trainer(load_run_config(run_file, overrides), writes=False)
    encoder, steps = trainer.runner.encoder, {"good": [], "changed": []}
    encode = encoder.encode

    def values() -> list[np.ndarray]:
        states = trainer.optimizer.state_tensors().values()
        return [tensor.numpy() for tensor in (*trainer.runner.model.parameters(), *states)]

    for number in range(3):
        is_hit = number == 1 and dist.get_rank() == dist.get_world_size() - 1
        encoder.encode = (lambda *given: encode(*given) * float("nan")) if is_hit else encode
        before = values()
        steps["good"].append(bool(trainer.train_one_step().is_good))
        steps["changed"].append(
            any(not np.array_equal(a, b) for a, b in zip(before, values(), strict=True))
        )
    trainer.feed.close()
    return steps


@pytest.fixture(scope="module")
def variants(run_file, one_device, tmp_path_factory) -> tuple[Path, Path, list[dict]]:
    """Folders of the variants' runs, on one device and on two ranks; and the guarded run's steps
    by rank."""
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    files = {"TEXT": run_file.with_name("text.jsonl"), "FEW": run_file.with_name("few.jsonl")}
    files["BASE"] = one_device / "final"
    every = {}
    for name, (settings, layout) in VARIANTS.items():
        for word, file in files.items():
            settings = [setting.replace(word, str(file)) for setting in settings]
        settings = [*common(run_file), *micro_batches(4), *settings]
        train(str(run_file), one / name, settings)
        every[name] = [*settings, COLOCATED, *layout]
    of_guard = [*common(run_file), *micro_batches(4), COLOCATED, PP2, "train.warmup_steps=0"]
    arguments = (str(run_file), str(two), every, [*of_guard, f"train.output_dir={two / 'guard'}"])
    return one, two, launch(worker_of_variants, 2, arguments=arguments, timeout=300)


@pytest.mark.parametrize("name", VARIANTS)
def test_other_runs_equal_one_device(variants, name):
    wanted, found = (folder / name for folder in variants[:2])
    if not name.startswith("adapters"):
        assert_equal_runs(found, wanted)
        return
    for stem in ("adapter_model", "optimizer"):
        ours, theirs = (
            {
                key: tensor.read()
                for key, tensor in read_checkpoint_headers(run / "checkpoint-4", stem).items()
            }
            for run in (found, wanted)
        )
        assert_close(ours, theirs)


def test_a_value_that_is_not_finite_skips_the_update_of_both_parts(variants):
    for steps in variants[2]:
        assert steps == {"good": [True, False, True], "changed": [True, False, True]}
