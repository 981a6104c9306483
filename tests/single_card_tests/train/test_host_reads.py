"""Host reads of the device in training.

Guarantees, for each family: no read in a steady-state step; one per report, made while the next
step runs; a run with updates masked on the device equals the run that reads the flags.

Updates are masked on a GPU. On a CPU, where a read waits for nothing, the tests enable masks. Reads
in `nn/cpu` belong to CPU kernels.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

from paddle_vl.config.load import load_run_config
from paddle_vl.testing import record_host_reads
from paddle_vl.train import trainer as trainer_module
from paddle_vl.train.build import build_trainer
from paddle_vl.train.feeding.device_copies import DeviceCopies
from tests.single_card_tests.train.fake_device import FakeDevice
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.support.finished_runs import lasting, metrics_of

OF_THE_CPU = ("nn/attention_masks.py", "nn/cpu/")


@pytest.fixture(scope="module", params=["language", "policy"])
def run_file(request, tmp_path_factory) -> Path:
    write = {"language": write_tiny_run, "policy": write_tiny_policy_run}[request.param]
    return write(tmp_path_factory.mktemp("run") / "data")


def build(run_file: Path, output_dir: Path, masks: bool, max_steps: int = 8):
    overrides = [f"train.output_dir={output_dir}", f"train.max_steps={max_steps}"]
    overrides += ["train.save_steps=null", "logging.logging_steps=3"]
    trainer = build_trainer(load_run_config(run_file, overrides))
    trainer.optimizer.masks_updates = masks
    return trainer


def test_a_step_reads_nothing_and_a_report_once_while_the_next_step_runs(
    run_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(trainer_module, "device_copies", lambda *_: DeviceCopies(FakeDevice()))
    trainer = build(run_file, tmp_path, masks=True)
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
    assert all(where.startswith("report: train/reporting/reporter.py") for _, where in steady)
    assert {step: n for (step, _), n in steady.items()} == {4: 1, 7: 1}
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


def test_a_run_of_masked_updates_is_the_one_whose_flags_are_read(run_file, tmp_path):
    for name, masks in (("plain", False), ("masked", True)):
        build(run_file, tmp_path / name, masks, max_steps=4).run()
    for ours, theirs in zip(
        lasting(metrics_of(tmp_path / "masked")),
        lasting(metrics_of(tmp_path / "plain")),
        strict=True,
    ):
        assert ours == pytest.approx(theirs, rel=1e-5)
    plain = load_file(tmp_path / "plain" / "final" / "model.safetensors")
    for name, array in load_file(tmp_path / "masked" / "final" / "model.safetensors").items():
        np.testing.assert_allclose(array, plain[name], rtol=1e-4, atol=1e-5, err_msg=name)
