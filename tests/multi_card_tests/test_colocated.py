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

`test_colocated_schedule` compares gradients themselves.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import paddle.distributed as dist
import pytest

from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.config.load import load_run_config
from paddle_vl.testing import qwen3_vl
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_run import MODEL as TINY_MODEL
from tests.single_card_tests.train.tiny_run import write_records
from tests.support.finished_runs import (
    arrays_of,
    assert_close,
    assert_equal_runs,
    assert_same_answers,
)
from tests.support.launch import launch
from tests.support.topology_runs import (
    DAMPED,
    RESUME,
    EqualsOneDevice,
    train,
    write_mixed_run,
)

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
# World size -> name -> overrides.
LAYOUTS = {
    2: {
        "pp2, encoder mp2": [PP2, encoder_mp(2), "parallel.encoder.offload_rows=true", RECOMPUTE],
        "pp2": [PP2, STATE, RECOMPUTE, *micro_batches(1)],
    },
}
HEAVY = {
    2: {
        "pp2 dualpipev": [PP2, "parallel.pp_schedule=dualpipev", "parallel.pp_split=cost"],
        "pp2 dynamic": [PP2, "parallel.pp_shapes=dynamic"],
        "pp2 reserved": [PP2, "parallel.pp_visual_rows=64"],
    },
    4: {
        "pp2 dp2": [PP2, DP2],
        "pp2 dp2, encoder mp2": [PP2, DP2, encoder_mp(2), STATE],
        "pp2 mp2 with sequence parallelism, encoder mp2": [PP2, *SP, encoder_mp(2), STATE],
        "pp2 sharding2, encoder mp4": [PP2, SHARDING2, encoder_mp(4)],
        "pp4 interleaved": [PP4, VIRTUAL, *micro_batches(8)],
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
    "tower frozen at first": (["train.unfreeze=[{at: 2, patterns: [vision, mergers]}]"], [PP2]),
    "frozen decoder": (["model.freeze=[language]"], [PP2, STATE]),
    "frozen blocks, rate of the mergers": (
        ["model.freeze=['model.visual.blocks.*']", "train.part_learning_rates={mergers: 1e-3}"],
        [PP2, encoder_mp(2)],
    ),
    "packing": (["data.packing=true", "data.max_length=128", *TWO_ROWS], [PP2, STATE]),
    "adapters in the decoder and the divided tower": (
        [
            "model={pretrained: BASE, lora: {r: 2, use_dora: true, target_modules: "
            "[q_proj, 'model.visual.blocks.*', 'model.visual.merger.*']}}"
        ],
        [PP2, encoder_mp(2)],
    ),
    "text only": (["data.train=[TEXT]"], [PP2, encoder_mp(2)]),
    "few images": (["data.train=[FEW]"], [PP2]),
    "experts": ([f"model.config={json.dumps(EXPERTS)}"], [PP2]),
}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    path = write_mixed_run(tmp_path_factory.mktemp("run"), 64, MODEL)
    records = [json.loads(line) for line in path.with_name("train.jsonl").read_text().splitlines()]
    without = [record for record in records if not record["images"]]
    write_records(path.with_name("text.jsonl"), [*without, *without, *without])
    # The order of samples puts the only images into some of the steps.
    write_records(path.with_name("few.jsonl"), [*without, *without, *without, records[1]])
    return path


def common(run_file: Path, num_data_parts: int = 1) -> list[str]:
    return [
        f"data.eval=[{run_file.with_name('test.jsonl')}]",
        *("train.save_steps=2", "train.eval_steps=2", "train.per_device_eval_batch_size=1"),
        *(*DAMPED, *micro_batches(4), f"train.per_device_train_batch_size={4 // num_data_parts}"),
    ]


def by_name(layouts: dict[int, dict[str, list[str]]]) -> dict[str, tuple[int, list[str]]]:
    return {
        name: (size, [COLOCATED, *layout])
        for size, of_size in layouts.items()
        for name, layout in of_size.items()
    }


class TestLayouts(EqualsOneDevice):
    topologies, heavy = by_name(LAYOUTS), by_name(HEAVY)

    @classmethod
    def settings(cls, run_file: Path, num_data_parts: int) -> list[str]:
        return [*common(run_file, num_data_parts), "train.eval={max_new_tokens: 5}"]

    def test_generated_answers_are_those_of_one_device(self, several, one_device):
        assert_same_answers(several, one_device)

    @pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.heavy)])
    def test_a_plain_run_continues_colocated(self, run_file, one_device, tmp_path, size):
        layout = next(iter((HEAVY if size == 4 else LAYOUTS)[size].values()))
        settings = [*common(run_file, 2 if DP2 in layout else 1), COLOCATED, *layout]
        shutil.copytree(one_device / "checkpoint-2", tmp_path / "checkpoint-2")
        launch(train, size, arguments=(run_file, tmp_path, [*settings, RESUME]))
        wanted = arrays_of(one_device / "checkpoint-4")
        assert_close(arrays_of(tmp_path / "checkpoint-4"), wanted)


def steps_of_a_guarded_run(run_file: str, overrides: list[str]) -> dict[str, list[bool]]:
    """Whether each of three steps is good and changes weights or moments; the second has a NaN in
    the last rank's encoder."""
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


def test_a_value_that_is_not_finite_skips_the_update_of_both_parts(run_file, tmp_path):
    overrides = [*common(run_file), COLOCATED, PP2, "train.warmup_steps=0"]
    overrides += [f"train.output_dir={tmp_path}"]
    for steps in launch(steps_of_a_guarded_run, 2, arguments=(str(run_file), overrides)):
        assert steps == {"good": [True, False, True], "changed": [True, False, True]}


# The toy of `test_colocated_schedule` has frozen parts and steps with few items too, and
# `test_lora` adapters.
ELSEWHERE = (
    "adapters in the decoder and the divided tower",
    "frozen blocks, rate of the mergers",
    "few images",
    "frozen decoder",
    "text only",
    "experts",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.heavy] * (name in ELSEWHERE)) for name in VARIANTS],
)
def test_other_runs_equal_one_device(run_file, tmp_path, name):
    settings, layout = VARIANTS[name]
    files = {"TEXT": run_file.with_name("text.jsonl"), "FEW": run_file.with_name("few.jsonl")}
    for word, file in files.items():
        settings = [setting.replace(word, str(file)) for setting in settings]
    if name.startswith("adapters"):
        train(run_file, tmp_path / "base", [*common(run_file), "train.max_steps=1"])
        settings = [setting.replace("BASE", str(tmp_path / "base/final")) for setting in settings]
    settings = [*common(run_file), *settings]
    one, two = tmp_path / "one", tmp_path / "two"
    train(run_file, one, settings)
    launch(train, 2, arguments=(run_file, two, [*settings, COLOCATED, *layout]))
    if not name.startswith("adapters"):
        assert_equal_runs(two, one)
        return
    for stem in ("adapter_model", "optimizer"):
        ours, theirs = (
            {
                key: tensor.read()
                for key, tensor in read_checkpoint_headers(run / "checkpoint-4", stem).items()
            }
            for run in (two, one)
        )
        assert_close(ours, theirs)
