"""Training on packed rows, from JSONL records to weights."""

from pathlib import Path

import pytest

from tests.single_card_tests.train import whole_runs
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.single_card_tests.train.whole_runs import metrics_of

PACKED = ["data.packing=true", "data.packing_length=256", "train.save_steps=2"]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("packed"), num_samples=40)


def build(run_file: Path, output_dir: Path, *overrides: str):
    return whole_runs.build(run_file, output_dir, *PACKED, *overrides)


def test_rows_hold_several_samples_and_the_fill_is_reported(run_file, tmp_path):
    trainer = build(run_file, tmp_path)
    batch = next(trainer.data)
    assert len(batch["input_ids"]) == 2
    assert 200 < batch["input_ids"].shape[1] <= 256
    assert len(batch["cu_seqlens"]) > 6
    real = batch["attention_mask"].mean()
    trainer = build(run_file, tmp_path, "train.gradient_accumulation_steps=1", "train.max_steps=1")
    trainer.run()
    assert metrics_of(tmp_path)[0]["packing_efficiency"] == pytest.approx(real, abs=1e-4)


def test_an_epoch_is_as_many_steps_as_its_rows_make(run_file, tmp_path):
    settings = ["train.max_steps=null", "train.num_train_epochs=1.0", "train.save_steps=null"]
    settings += ["train.gradient_accumulation_steps=1", "train.per_device_train_batch_size=1"]
    trainer = build(run_file, tmp_path, *settings)
    assert trainer.num_steps == len(trainer.data) < 20
    trainer.run()
    (*_, last) = metrics_of(tmp_path)
    assert (last["step"], last["epoch"]) == (trainer.num_steps, 1.0)


def test_a_step_on_packed_rows_equals_one_on_the_samples(run_file, tmp_path):
    """Both steps have every sample once: the same targets, loss and gradient norm."""
    common = ["train.max_steps=1", "train.gradient_accumulation_steps=1"]
    build(run_file, tmp_path / "plain", *common, "train.per_device_train_batch_size=40",
          "data.packing=false", "data.packing_length=null").run()  # fmt: skip
    build(run_file, tmp_path / "packed", *common, "train.per_device_train_batch_size=20").run()
    found, wanted = (metrics_of(tmp_path / name)[0] for name in ("packed", "plain"))
    assert found["target_tokens"] == wanted["target_tokens"]
    for key in ("loss", "grad_norm"):
        assert found[key] == pytest.approx(wanted[key], rel=1e-6), key


def test_samples_too_long_to_cut_are_left_out_and_counted(run_file, tmp_path):
    settings = ["data.max_length=24", "data.packing_length=64", "train.max_steps=1"]
    with pytest.raises(ValueError, match=r"train\.jsonl:\d+: the sample has \d+ tokens"):
        build(run_file, tmp_path, *settings)
    trainer = build(run_file, tmp_path, *settings, "data.on_bad_sample=skip", "data.max_length=40")
    trainer.run()
    assert metrics_of(tmp_path)[0]["skipped_samples"] == trainer.data.skipped["too_long"] > 0


def test_evaluation_has_one_sample_a_row(run_file, tmp_path):
    settings = [f"data.eval=[{run_file.with_name('test.jsonl')}]", "train.eval_steps=1"]
    settings += ["train.learning_rate=0", "train.max_steps=1"]
    build(run_file, tmp_path / "packed", *settings).run()
    build(run_file, tmp_path / "plain", *settings, "data.packing=false",
          "data.packing_length=null").run()  # fmt: skip
    found, wanted = (metrics_of(tmp_path / name)[0]["eval_loss"] for name in ("packed", "plain"))
    assert found == wanted
