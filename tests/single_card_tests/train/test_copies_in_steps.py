"""Host-to-device copies and host reads in training, each of which would drain a GPU's queue.

For each family a steady step copies nothing but its batches, through pinned memory, and reads one
number, after the next step's batches are on their way; a report reads once, while the next step
runs. Reads in `nn/cpu` belong to CPU kernels.
"""

from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.families.vlm.inputs.collate import prepared
from paddle_vl.nn.transfer import rows_in_order
from paddle_vl.testing import (
    record_device_copies,
    record_host_reads,
    run_ranks,
    tiny_pi07,
    tiny_pi07_batch,
    tiny_qwen3_vl,
    tiny_qwen3_vl_batch,
    tiny_qwen3_vl_config,
)
from paddle_vl.train import trainer as trainer_module
from paddle_vl.train.build import build_trainer
from paddle_vl.train.feeding.device_copies import DeviceCopies
from tests.single_card_tests.train.fake_device import FakeDevice
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.single_card_tests.train.tiny_run import MODEL, MODEL_3_5, write_tiny_run
from tests.support.finished_runs import metrics_of
from tests.support.gpu_stubs.pretended import pretended_gpu
from tests.support.pinned import pinned_on_a_cpu

FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
WITH_EXPERTS = MODEL | {
    "model_type": "qwen3_vl_moe",
    "text_config": MODEL["text_config"] | FEW_EXPERTS,
}
# Copies of batches, through pinned memory.
FEED = "train/feeding/device_copies.py"


@pytest.mark.parametrize(
    ("write", "settings"),
    [
        (write_tiny_run, []),
        (write_tiny_run, ["data.packing=true", "data.max_length=96"]),
        (partial(write_tiny_run, model=WITH_EXPERTS), ["data.packing=true", "data.max_length=96"]),
        (partial(write_tiny_run, model=MODEL_3_5), ["data.packing=true", "data.max_length=96"]),
        (write_tiny_policy_run, []),
    ],
    ids=["language", "packed", "experts", "delta rule", "policy"],
)
def test_a_steady_step_copies_nothing_but_its_batches(tmp_path, monkeypatch, write, settings):
    monkeypatch.setattr(
        trainer_module, "device_copies", lambda *_, **__: DeviceCopies(FakeDevice())
    )
    overrides = [f"train.output_dir={tmp_path / 'out'}", "train.max_steps=4"]
    overrides += ["train.save_steps=null", *settings]
    trainer = build_trainer(load_run_config(write(tmp_path / "data"), overrides))
    own, found = trainer.train_one_step, []

    def counted(*arguments):
        begin = len(copies)
        result = own(*arguments)
        # Tables are copied in the first step.
        found.extend(place for place in copies[begin:] if trainer.step > 1)
        return result

    trainer.train_one_step = counted
    with record_device_copies() as copies, pretended_gpu(), pinned_on_a_cpu():
        trainer.run()
    assert [place for place in found if not place.startswith(FEED)] == []
    assert copies


TOWERS = ("parallel/region_ops.py", "families/qwen3_vl/vision", "families/pi07/vision.py")


@pytest.mark.parametrize("family", ["qwen3_vl", "pi07"])
def test_ranks_that_divide_the_towers_work_copy_nothing_for_it(family):
    def step(placement):
        if family == "pi07":
            losses = tiny_pi07(placement)(tiny_pi07_batch())
            (losses["MSE"] + losses["CE"]).backward()
            return
        vision = tiny_qwen3_vl_config().vision_config
        tiny_qwen3_vl(placement)(**prepared(tiny_qwen3_vl_batch(), vision)).loss.backward()

    with record_device_copies() as copies:
        run_ranks(step, 2)
    assert copies
    assert [place for place in copies if place.startswith(TOWERS)] == []


def test_rows_in_order_are_those_of_an_index():
    x = paddle.arange(20).reshape([10, 2])
    for rows in ([], [3], [0, 1, 2], [5, 6, 1, 2, 9], [4, 3, 2], [7, 7, 8]):
        rows = np.array(rows, dtype=np.int64)
        np.testing.assert_array_equal(rows_in_order(x, rows).numpy(), x.numpy()[rows])


def test_every_way_to_copy_is_counted_once():
    array, tensor = np.ones([2], np.float32), paddle.zeros([2])
    ways = [
        lambda: paddle.to_tensor(array),
        lambda: paddle.to_tensor(1.5),
        lambda: paddle.to_tensor([1, 2]),
        lambda: paddle.Tensor(array),
        lambda: paddle.assign(array),
        lambda: tensor.set_value(array),
    ]
    for way in ways:
        with record_device_copies() as copies:
            way()
        assert len(copies) == 1, way
    with record_device_copies() as copies:
        paddle.to_tensor(array, place=paddle.CPUPlace())
        paddle.full([2], 3.0) + paddle.arange(2) * 2.0
        tensor.set_value(tensor + 1)
    assert copies == []


OF_THE_CPU = ("nn/attention_masks.py", "nn/cpu/")


@pytest.fixture(scope="module", params=["language", "policy"])
def any_run_file(request, tmp_path_factory) -> Path:
    write = {"language": write_tiny_run, "policy": write_tiny_policy_run}[request.param]
    return write(tmp_path_factory.mktemp("run") / "data")


def test_a_step_reads_its_norm_and_a_report_once_while_the_next_step_runs(
    any_run_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(trainer_module, "device_copies", lambda *_: DeviceCopies(FakeDevice()))
    overrides = [f"train.output_dir={tmp_path}", "train.max_steps=8", "train.save_steps=null"]
    trainer = build_trainer(load_run_config(any_run_file, [*overrides, "logging.logging_steps=3"]))
    update = trainer.optimizer.update

    def after_the_copies(*arguments):
        # There is no step after the last.
        assert trainer.feed._next is not None or trainer.step == 7
        update(*arguments)

    trainer.optimizer.update = after_the_copies
    train_one_step, between_steps = trainer.train_one_step, trainer._between_steps
    places: Counter[tuple[int, str]] = Counter()

    def counted(where, function):
        def run(*arguments):
            begin = len(reads)
            result = function(*arguments)
            found = [place for place in reads[begin:] if not place.startswith(OF_THE_CPU)]
            places.update((trainer.step, f"{where}: {place}") for place in found)
            return result

        return run

    with record_host_reads() as reads:
        trainer.train_one_step = counted("step", train_one_step)
        trainer._between_steps = counted("between", between_steps)
        trainer.reporter.write = counted("report", trainer.reporter.write)
        trainer.run()
    # The last step saves a checkpoint.
    steady = {(step, where): n for (step, where), n in places.items() if step < 8}
    found = {(step, where.rpartition(":")[0]): n for (step, where), n in steady.items()}
    # A step counts when it is over.
    wanted = dict.fromkeys([(step, "step: train/step.py") for step in range(1, 8)], 1)
    assert found == wanted | {(n, "report: train/reporting/reporter.py"): 1 for n in (4, 7)}
    assert [line["step"] for line in metrics_of(tmp_path)] == [3, 6, 8]
