"""Runs that stop, resume and save: signals, skipped updates, slow, full and damaged disks.

Kinds of run that resume: `test_resumed_runs`.
"""

import errno
import json
import os
import shutil
import signal
import time

import pytest

from paddle_vl.checkpoint.manifest import SummedStream
from paddle_vl.train import trainer as trainer_module
from paddle_vl.train.checkpoint import model_folder
from paddle_vl.train.reporting.run_files import read_starts
from tests.single_card_tests.train.batches import outcome
from tests.single_card_tests.train.saved import flip
from tests.single_card_tests.train.whole_runs import assert_same_run, build, evaluated, metrics_of


def test_resumed_run_is_bit_identical(whole_run, run_file, tmp_path):
    """A crash after the metrics line of step 3; the last checkpoint is from step 2."""
    shutil.copytree(whole_run / "checkpoint-2", tmp_path / "checkpoint-2")
    lines = (whole_run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]) + '{"step": 4, "lo')
    (tmp_path / ".partial-checkpoint-4").mkdir()
    resumed = build(
        run_file,
        tmp_path,
        *evaluated(run_file.with_name("test.jsonl")),
        "train.resume_from_checkpoint=auto",
        "data.num_workers=1",
    )
    assert resumed.step == 2
    resumed.run()
    assert_same_run(whole_run, tmp_path)
    assert [(e["first_step"], e["last_step"]) for e in read_starts(tmp_path)] == [(2, 4)]
    assert not (tmp_path / ".partial-checkpoint-4").exists()


def test_signal_saves_and_the_resumed_run_is_bit_identical(run_file, tmp_path, monkeypatch):
    """The signal arrives in step 3, between two reports that cover two steps each."""
    settings = ["logging.logging_steps=2", "train.save_steps=null"]
    build(run_file, tmp_path / "whole", *settings).run()
    plain = trainer_module.train_step
    trainer = build(run_file, tmp_path / "cut", *settings)

    def step_with_signal(model, optimizer, *arguments):
        step_with_signal.calls += 1
        if step_with_signal.calls == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            # A thread looks for signals; a step may be shorter than its interval.
            while trainer.stop.received is None:
                time.sleep(0.01)
        return plain(model, optimizer, *arguments)

    step_with_signal.calls = 0
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "train_step", step_with_signal)
        assert trainer.run() == signal.SIGTERM
    assert not (tmp_path / "cut" / "final").exists()
    assert model_folder(tmp_path / "cut") == tmp_path / "cut" / "checkpoint-3"
    resume = "train.resume_from_checkpoint=auto"
    assert build(run_file, tmp_path / "cut", *settings, resume).run() is None
    assert_same_run(tmp_path / "whole", tmp_path / "cut", begun_anew="sequence_length")


def test_settings_that_trained_nothing_do_not_replace_those_that_did(run_file, tmp_path):
    build(run_file, tmp_path).run()
    before = (tmp_path / "config.yaml").read_text()
    auto = "train.resume_from_checkpoint=auto"
    build(run_file, tmp_path, auto, "train.learning_rate=0.5").run()
    assert (tmp_path / "config.yaml").read_text() == before
    build(run_file, tmp_path, auto, "train.learning_rate=0.25", "train.max_steps=5").run()
    assert "learning_rate: 0.25" in (tmp_path / "config.yaml").read_text()
    rates = [start["settings"]["train"]["learning_rate"] for start in read_starts(tmp_path)]
    assert rates == [0.01, 0.5, 0.25]


def broken_steps(monkeypatch, *broken):
    """Skip the updates of these steps because of a non-finite loss."""
    plain, calls = trainer_module.train_step, []

    def step(model, optimizer, *arguments):
        calls.append(1)
        if len(calls) in broken:
            return outcome(float("nan"), float("inf"), 3, 9, is_good=False)
        return plain(model, optimizer, *arguments)

    monkeypatch.setattr(trainer_module, "train_step", step)


def test_nonfinite_updates_stop_the_run_and_keep_the_last_good_checkpoint(
    run_file, tmp_path, monkeypatch
):
    """Skipped updates may be saved, but never replace the last checkpoint before them."""
    broken_steps(monkeypatch, *range(3, 20))
    trainer = build(
        run_file, tmp_path, "train.max_steps=20", "train.max_nonfinite_steps=3",
        "train.save_steps=1", "train.save_total_limit=1",
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"3 updates in a row were skipped up to step 5"):
        trainer.run()
    assert (tmp_path / "checkpoint-2").is_dir()
    assert not (tmp_path / "checkpoint-1").exists()
    assert not (tmp_path / "final").exists()
    lines = metrics_of(tmp_path)
    assert [line["skipped_updates"] for line in lines] == [0, 0, 1, 2, 3]
    assert lines[3]["loss"] is None
    (start,) = read_starts(tmp_path)
    assert start["ended"] is not None


@pytest.mark.parametrize(
    ("broken", "settings", "kept", "skipped"),
    [
        # One that is due while updates are skipped comes after the next good one.
        ((2, 3), ["train.max_steps=5"], ["checkpoint-4", "checkpoint-5"], 0),
        # One at the end deletes no older one.
        ((3, 4), ["train.save_total_limit=1"], ["checkpoint-2", "checkpoint-4"], 2),
    ],
)
def test_checkpoints_while_updates_are_skipped(
    run_file, tmp_path, monkeypatch, caplog, broken, settings, kept, skipped
):
    broken_steps(monkeypatch, *broken)
    build(run_file, tmp_path, "train.save_steps=2", *settings).run()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == kept
    put_off = "checkpoint-2 is put off until an update is not skipped: 1 in a row"
    assert (put_off in caplog.text) == (broken == (2, 3))
    state = json.loads((tmp_path / kept[-1] / "trainer_state.json").read_text())
    assert state["nonfinite_updates"] == skipped


def test_a_checkpoint_holds_the_step_that_it_was_made_at_however_slow_the_disk(
    run_file, tmp_path, monkeypatch
):
    settings = ["train.save_steps=1", "logging.logging_steps=4"]
    build(run_file, tmp_path / "plain", *settings, "train.async_save=false").run()
    plain = SummedStream.write

    def slow(stream, *arguments):
        # A checkpoint still takes longer than the steps up to the next one.
        time.sleep(0.004)
        plain(stream, *arguments)

    monkeypatch.setattr(SummedStream, "write", slow)
    build(run_file, tmp_path / "slow", *settings, "train.async_save=true").run()
    for folder in ("checkpoint-1", "checkpoint-3", "checkpoint-4", "final"):
        for name in ("model.safetensors", "optimizer.safetensors")[: 1 if folder == "final" else 2]:
            one, other = (tmp_path / run / folder / name for run in ("plain", "slow"))
            assert one.read_bytes() == other.read_bytes(), (folder, name)


def test_a_write_that_fails_ends_the_run_at_a_step_behind_it(run_file, tmp_path, monkeypatch):
    """The run ends before the next checkpoint at the last step."""

    def full(stream):
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = build(run_file, tmp_path, "train.save_steps=10", "train.max_steps=20")
    monkeypatch.setattr(SummedStream, "to_disk", full)
    with pytest.raises(RuntimeError, match=r"checkpoint-10 could not be written: .*No space left"):
        trainer.run()
    assert 10 < trainer.step < 20
    (start,) = read_starts(tmp_path)
    assert start["last_step"] == trainer.step


def test_training_does_not_start_from_damaged_weights(whole_run, run_file, tmp_path):
    shutil.copytree(whole_run / "final", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    flip(file)
    settings = ["model.config=null", f"model.pretrained={file.parent}", "data.processor=null"]
    with pytest.raises(RuntimeError, match=r"model\.pretrained .*model\.safetensors does not have"):
        build(run_file, tmp_path / "out", *settings)
    build(run_file, tmp_path / "out", *settings, "train.verify_checkpoint=false")
