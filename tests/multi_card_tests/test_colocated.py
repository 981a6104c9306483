"""Full training runs of Qwen3-VL under the colocated schedule, against the same run on one device.

Guarantees: one rank's value that is not finite skips the update of both parts on all ranks; with a
frozen tower that encodes a step ahead, evaluations between the steps too, metrics, parameters and
moments are equal. Besides (heavy), with more, as many and fewer encoder lanes than data lanes, on
samples with two images, one and none:

- loss, gradient norm, evaluation loss, generated answers, every parameter and every moment after
  four optimizer steps are equal, with more micro-batches than stages, and adapters in a divided
  tower;
- a resumed run is bit-identical, also where encoder and optimizer state are divided over all ranks;
- a plain run continues colocated.

`test_colocated_schedule` compares gradients themselves, `tests/routes` has runs on two ranks.
"""

import shutil
from pathlib import Path
from typing import ClassVar

import numpy as np
import paddle.distributed as dist
import pytest

from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.config.load import load_run_config
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_run import MODEL as TINY_MODEL
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


def encoder_mp(degree: int) -> str:
    return f"parallel.encoder.mp_degree={degree}"


def micro_batches(count: int) -> list[str]:
    """The same 16 samples of a step in another number of micro-batches."""
    return [
        f"train.gradient_accumulation_steps={count}",
        f"train.per_device_train_batch_size={16 // count}",
    ]


TOPOLOGIES = {
    "pp2 dp2": (4, [PP2, DP2]),
    "pp2 dp2, encoder mp4": (
        4,
        [PP2, DP2, encoder_mp(4), "parallel.encoder.offload_rows=true", RECOMPUTE],
    ),
    "pp2 mp2 with sequence parallelism, encoder mp2": (4, [PP2, *SP, encoder_mp(2), STATE]),
    "pp2 sharding2": (4, [PP2, SHARDING2, STATE]),
    "pp4 interleaved": (4, [PP4, "parallel.num_virtual_stages=2", *[8]]),
    "pp2 mp2 dp2, encoder mp4": (8, [PP2, *SP, DP2, encoder_mp(4)]),
}
MODEL = TINY_MODEL | {
    "text_config": TINY_MODEL["text_config"] | {"num_hidden_layers": 8},
    "vision_config": TINY_MODEL["vision_config"]
    | {"hidden_size": 32, "num_heads": 8, "depth": 3, "deepstack_visual_indexes": [0, 1, 2]},
}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_mixed_run(tmp_path_factory.mktemp("run"), 64, MODEL)


def common(run_file: Path, num_data_parts: int = 1) -> list[str]:
    return [
        f"data.eval=[{run_file.with_name('test.jsonl')}]",
        *("train.save_steps=2", "train.eval_steps=2", "train.per_device_eval_batch_size=1"),
        *(*DAMPED, *[4], f"train.per_device_train_batch_size={4 // num_data_parts}"),
    ]


@pytest.mark.heavy
class TestLayouts(EqualsOneDevice):
    topologies: ClassVar = {
        name: (size, [COLOCATED, *layout]) for name, (size, layout) in TOPOLOGIES.items()
    }

    @classmethod
    def settings(cls, run_file: Path, num_data_parts: int) -> list[str]:
        return [*common(run_file, num_data_parts), "train.eval={max_new_tokens: 5}"]

    def test_generated_answers_are_those_of_one_device(self, several, one_device):
        assert_same_answers(several, one_device)

    def test_a_plain_run_continues_colocated(self, run_file, one_device, tmp_path):
        size, layout = self.topologies["pp2 dp2"]
        shutil.copytree(one_device / "checkpoint-2", tmp_path / "checkpoint-2")
        launch(train, size, arguments=(run_file, tmp_path, [*common(run_file, 2), *layout, RESUME]))
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


def test_a_frozen_tower_encodes_ahead(run_file, tmp_path):
    settings = [*common(run_file), "model.freeze=[vision, mergers]"]
    one, two = tmp_path / "one", tmp_path / "two"
    train(run_file, one, settings)
    launch(train, 2, arguments=(run_file, two, [*settings, COLOCATED, PP2]))
    assert_equal_runs(two, one)


@pytest.mark.heavy
def test_adapters_in_the_decoder_and_the_divided_tower(run_file, tmp_path):
    train(run_file, tmp_path / "base", [*common(run_file), "train.max_steps=1"])
    targets = "[q_proj, 'model.visual.blocks.*', 'model.visual.merger.*']"
    lora = f"lora: {{r: 2, use_dora: true, target_modules: {targets}}}"
    settings = [*common(run_file), f"model={{pretrained: {tmp_path / 'base/final'}, {lora}}}"]
    one, two = tmp_path / "one", tmp_path / "two"
    train(run_file, one, settings)
    launch(train, 2, arguments=(run_file, two, [*settings, COLOCATED, PP2, encoder_mp(2)]))
    for stem in ("adapter_model", "optimizer"):
        ours, theirs = (
            {
                key: tensor.read()
                for key, tensor in read_checkpoint_headers(run / "checkpoint-4", stem).items()
            }
            for run in (two, one)
        )
        assert_close(ours, theirs)
