"""Host reads of the device in training.

Guarantees, for each family: a step reads one number, after the next step's batches are on their way
to the device; a report one, while the next step runs. Reads in `nn/cpu` belong to CPU kernels.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.testing import record_host_reads
from paddle_vl.train import trainer as trainer_module
from paddle_vl.train.build import build_trainer
from paddle_vl.train.feeding.device_copies import DeviceCopies
from tests.single_card_tests.train.fake_device import FakeDevice
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.finished_runs import metrics_of

OF_THE_CPU = ("nn/attention_masks.py", "nn/cpu/")


@pytest.fixture(scope="module", params=["language", "policy"])
def run_file(request, tmp_path_factory) -> Path:
    write = {"language": write_tiny_run, "policy": write_tiny_policy_run}[request.param]
    return write(tmp_path_factory.mktemp("run") / "data")


def test_a_step_reads_its_norm_and_a_report_once_while_the_next_step_runs(
    run_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(trainer_module, "device_copies", lambda *_: DeviceCopies(FakeDevice()))
    overrides = [f"train.output_dir={tmp_path}", "train.max_steps=8", "train.save_steps=null"]
    trainer = build_trainer(load_run_config(run_file, [*overrides, "logging.logging_steps=3"]))
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


def test_every_way_to_read_is_counted_once():
    tensor = paddle.to_tensor([1.5])
    ways = [
        lambda: tensor.numpy(),
        lambda: tensor.item(),
        lambda: tensor.tolist(),
        lambda: float(tensor.sum()),
        lambda: bool(tensor.sum()),
        lambda: int(tensor.sum()),
        lambda: np.asarray(tensor),
    ]
    for way in ways:
        with record_host_reads() as reads:
            way()
        assert len(reads) == 1, way
    with record_host_reads() as reads:
        _ = tensor + tensor.sum() * 2
    assert reads == []
