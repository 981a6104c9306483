"""Whole runs of a tiny model on files.

Guarantees: two seeded runs are bit-identical; a run that was cut off and resumed is bit-identical
to one that was not, in every weight, the optimizer state and the metrics; a signal saves and stops;
non-finite updates stop the run and leave the last good checkpoint; the output folder holds what the
help says.
"""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl.config.load import load_run_config
from paddle_vl.models.checkpoint.manifest import SummedStream
from paddle_vl.train import trainer as trainer_module
from paddle_vl.train.build import build_trainer
from paddle_vl.train.checkpoint import model_folder
from paddle_vl.train.reporting.progress import ProgressBar
from paddle_vl.train.reporting.run_starts import read_starts
from tests.finished_runs import lasting
from tests.finished_runs import metrics_of as run_metrics
from tests.single_card_tests.train.batches import outcome
from tests.single_card_tests.train.tiny_run import write_tiny_run


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_tiny_run(tmp_path_factory.mktemp("run"))


def build(run_file: Path, output_dir: Path, *overrides: str):
    config = load_run_config(run_file, [f"train.output_dir={output_dir}", *overrides])
    return build_trainer(config)


def metrics_of(folder: Path) -> list[dict]:
    return lasting(run_metrics(folder))


def assert_same_run(one: Path, other: Path, begun_anew: str | None = None) -> None:
    """Every parameter, state and line; but for keys that a run that continues begins anew."""
    checkpoint = "checkpoint-4"
    for name in ("model.safetensors", "optimizer.safetensors"):
        expected, found = load_file(one / checkpoint / name), load_file(other / checkpoint / name)
        assert expected.keys() == found.keys()
        for key, array in expected.items():
            np.testing.assert_array_equal(found[key], array, err_msg=key)
    state, other_state = (
        json.loads((folder / checkpoint / "trainer_state.json").read_text())
        for folder in (one, other)
    )
    assert state == other_state
    lines, others = (
        [{k: v for k, v in line.items() if not begun_anew or begun_anew not in k} for line in run]
        for run in (metrics_of(one), metrics_of(other))
    )
    assert lines == others


@pytest.fixture(scope="module")
def whole_run(run_file, tmp_path_factory) -> Path:
    """Four steps without a break, a checkpoint every second step, with evaluation."""
    output_dir = tmp_path_factory.mktemp("whole") / "out"
    data = run_file.with_name("test.jsonl")
    trainer = build(run_file, output_dir, *evaluated(data))
    assert trainer.run() is None
    return output_dir


def evaluated(data: Path) -> list[str]:
    return [f"data.eval=[{data}]", "train.eval_steps=2", "train.save_steps=2"]


def test_output_folder_holds_what_the_help_says(whole_run):
    assert sorted(path.name for path in whole_run.iterdir()) == [
        "checkpoint-2", "checkpoint-4", "config.yaml", "final", "loss.png", "metrics.jsonl",
        "run.json",
    ]  # fmt: skip
    final = {path.name for path in (whole_run / "final").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= final
    assert "optimizer.safetensors" not in final
    assert model_folder(whole_run) == whole_run / "final"
    assert load_run_config(whole_run / "config.yaml").train.max_steps == 4


def test_metrics_have_every_quantity(whole_run):
    lines = [json.loads(line) for line in (whole_run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.0, 0.01, 0.0075, 0.0025])
    assert set(lines[1]) == {
        "step", "epoch", "loss", "learning_rate", "grad_norm", "samples_per_second",
        "tokens_per_second", "step_seconds", "step_seconds_max", "data_wait_seconds", "memory_gb",
        "sequence_length_min", "sequence_length_mean", "sequence_length_max",
        "target_tokens", "skipped_updates", "skipped_samples", "eval_loss",
    }  # fmt: skip
    assert "eval_loss" not in lines[0]
    assert lines[3]["epoch"] == pytest.approx(4 * 4 / 12, abs=1e-4)
    assert lines[3]["eval_loss"] < lines[1]["eval_loss"]
    assert all(line["tokens_per_second"] > 0 for line in lines)


def test_two_seeded_runs_are_bit_identical(whole_run, run_file, tmp_path):
    build(run_file, tmp_path, *evaluated(run_file.with_name("test.jsonl"))).run()
    assert_same_run(whole_run, tmp_path)


def test_another_seed_gives_another_run(whole_run, run_file, tmp_path):
    build(run_file, tmp_path, "train.seed=6", "train.max_steps=1").run()
    assert metrics_of(tmp_path)[0]["loss"] != metrics_of(whole_run)[0]["loss"]


def test_resumed_run_is_bit_identical(whole_run, run_file, tmp_path):
    """A crash after the metrics line of step 3: its checkpoint is that of step 2."""
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_the_resumed_run_is_bit_identical(run_file, tmp_path, monkeypatch, number):
    """The signal arrives within step 3, between two reports of two steps each."""
    settings = ["logging.logging_steps=2", "train.save_steps=null"]
    build(run_file, tmp_path / "whole", *settings).run()
    plain = trainer_module.train_step

    def step_with_signal(model, optimizer, *arguments):
        step_with_signal.calls += 1
        if step_with_signal.calls == 3:
            os.kill(os.getpid(), number)
        return plain(model, optimizer, *arguments)

    step_with_signal.calls = 0
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "train_step", step_with_signal)
        assert build(run_file, tmp_path / "cut", *settings).run() == number
    assert not (tmp_path / "cut" / "final").exists()
    assert model_folder(tmp_path / "cut") == tmp_path / "cut" / "checkpoint-3"
    resume = "train.resume_from_checkpoint=auto"
    assert build(run_file, tmp_path / "cut", *settings, resume).run() is None
    assert_same_run(tmp_path / "whole", tmp_path / "cut", begun_anew="sequence_length")


def test_an_evaluation_that_a_signal_ends_is_done_when_the_run_continues(run_file, tmp_path):
    settings = [*evaluated(run_file.with_name("test.jsonl")), "train.save_steps=null"]
    build(run_file, tmp_path / "whole", *settings).run()
    trainer = build(run_file, tmp_path / "cut", *settings)
    evaluate = trainer.evaluate

    def with_signal(received):
        os.kill(os.getpid(), signal.SIGTERM)
        while received() is None:
            time.sleep(0.01)
        return evaluate(received)

    trainer.evaluate = with_signal
    assert trainer.run() == signal.SIGTERM
    step = trainer.step
    assert not any("eval_loss" in line for line in run_metrics(tmp_path / "cut"))
    build(run_file, tmp_path / "cut", *settings, "train.resume_from_checkpoint=auto").run()
    first = next(line for line in run_metrics(tmp_path / "cut") if "eval_loss" in line)
    assert first["step"] == step
    wanted = [line["eval_loss"] for line in run_metrics(tmp_path / "whole") if "eval_loss" in line]
    found = [line["eval_loss"] for line in run_metrics(tmp_path / "cut") if "eval_loss" in line]
    assert found == wanted


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


def test_resuming_reports_and_refuses_changes(whole_run, run_file, tmp_path, caplog):
    shutil.copytree(whole_run, tmp_path, dirs_exist_ok=True)
    settings = [*evaluated(run_file.with_name("test.jsonl")), "train.resume_from_checkpoint=auto"]
    with caplog.at_level(logging.INFO):
        trainer = build(run_file, tmp_path, *settings, "train.max_steps=6")
    assert "changed since checkpoint-4: train.max_steps: 4 -> 6" in caplog.text
    assert (trainer.step, trainer.num_steps) == (4, 6)
    with pytest.raises(ValueError, match=r"train\.gradient_accumulation_steps: 2 -> 1"):
        build(run_file, tmp_path, *settings, "train.gradient_accumulation_steps=1")


def test_nonfinite_updates_stop_the_run_and_keep_the_last_good_checkpoint(
    run_file, tmp_path, monkeypatch
):
    """Skipped updates may be saved, but never at the cost of the last checkpoint before them."""
    plain = trainer_module.train_step

    def step_that_breaks(model, optimizer, *arguments):
        step_that_breaks.calls += 1
        if step_that_breaks.calls > 2:
            return outcome(float("nan"), float("inf"), 3, 9, is_good=False)
        return plain(model, optimizer, *arguments)

    step_that_breaks.calls = 0
    monkeypatch.setattr(trainer_module, "train_step", step_that_breaks)
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


def broken_steps(monkeypatch, *broken):
    """Updates of these steps are skipped, as a loss is not finite."""
    plain, calls = trainer_module.train_step, []

    def step(model, optimizer, *arguments):
        calls.append(1)
        if len(calls) in broken:
            return outcome(float("nan"), float("inf"), 3, 9, is_good=False)
        return plain(model, optimizer, *arguments)

    monkeypatch.setattr(trainer_module, "train_step", step)


def test_a_checkpoint_that_is_due_while_updates_are_skipped_comes_after_the_next_good_one(
    run_file, tmp_path, monkeypatch, caplog
):
    broken_steps(monkeypatch, 2, 3)
    build(run_file, tmp_path, "train.max_steps=5", "train.save_steps=2").run()
    names = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-4", "checkpoint-5"]
    assert "checkpoint-2 is put off: 1 updates in a row were skipped" in caplog.text
    assert "is marked" not in caplog.text


def test_a_checkpoint_at_the_end_is_marked_while_updates_are_skipped(
    run_file, tmp_path, monkeypatch, caplog
):
    with monkeypatch.context() as patch:
        broken_steps(patch, 3, 4)
        build(run_file, tmp_path, "train.save_steps=2").run()
    marked = tmp_path / "checkpoint-4"
    for name in ("manifest.json", "trainer_state.json"):
        assert json.loads((marked / name).read_text())["nonfinite_updates"] == 2
    resume = ["train.save_steps=2", "train.max_steps=6"]
    again = build(run_file, tmp_path, *resume, "train.resume_from_checkpoint=auto")
    assert again.step == 2
    assert "passed over checkpoint-4: the last 2 updates before it were skipped" in caplog.text
    assert build(run_file, tmp_path, *resume, f"train.resume_from_checkpoint={marked}").step == 4
    again.run()
    assert json.loads((marked / "manifest.json").read_text())["nonfinite_updates"] == 0


def test_a_checkpoint_holds_the_step_that_it_was_made_at_however_slow_the_disk(
    run_file, tmp_path, monkeypatch
):
    settings = ["train.save_steps=1", "logging.logging_steps=4"]
    build(run_file, tmp_path / "plain", *settings, "train.async_save=false").run()
    plain = SummedStream.write

    def slow(stream, *arguments):
        time.sleep(0.02)
        plain(stream, *arguments)

    monkeypatch.setattr(SummedStream, "write", slow)
    build(run_file, tmp_path / "slow", *settings, "train.async_save=true").run()
    for folder in ("checkpoint-1", "checkpoint-3", "checkpoint-4", "final"):
        for name in ("model.safetensors", "optimizer.safetensors")[: 1 if folder == "final" else 2]:
            one, other = (tmp_path / run / folder / name for run in ("plain", "slow"))
            assert one.read_bytes() == other.read_bytes(), (folder, name)


def test_a_write_that_fails_ends_the_run_at_a_step_behind_it(run_file, tmp_path, monkeypatch):
    """Not as late as the next checkpoint, at the last step."""

    def full(stream):
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = build(run_file, tmp_path, "train.save_steps=10", "train.max_steps=20")
    monkeypatch.setattr(SummedStream, "to_disk", full)
    with pytest.raises(RuntimeError, match=r"checkpoint-10 could not be written: .*No space left"):
        trainer.run()
    assert 10 < trainer.step < 20
    (start,) = read_starts(tmp_path)
    assert start["last_step"] == trainer.step


def test_a_process_killed_in_the_middle_of_a_write_loses_nothing(whole_run, run_file, tmp_path):
    settings = [
        f"train.output_dir={tmp_path}", *evaluated(run_file.with_name("test.jsonl")),
        "train.resume_from_checkpoint=auto", "train.max_steps=6", "train.warmup_steps=1",
        "train.lr_scheduler_type=constant",
    ]  # fmt: skip
    root = Path(__file__).parents[3]
    killed = subprocess.run(
        [sys.executable, Path(__file__).with_name("killed_save.py"), run_file, *settings],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(path.name for path in tmp_path.glob("*checkpoint-*")) == [
        ".partial-checkpoint-4", "checkpoint-2",
    ]  # fmt: skip
    trainer = build(run_file, tmp_path, *settings[1:])
    assert trainer.step == 2
    trainer.run()
    build(run_file, tmp_path / "whole", *settings[1:]).run()
    assert_same_run(tmp_path / "whole", tmp_path)


def test_bar_says_when_the_run_evaluates(run_file, tmp_path, monkeypatch):
    shown = []

    @contextmanager
    def evaluating(bar):
        shown.append("evaluating")
        yield
        shown.append("training")

    monkeypatch.setattr(ProgressBar, "evaluating", evaluating)
    trainer = build(run_file, tmp_path, *evaluated(run_file.with_name("test.jsonl")))
    losses = trainer.evaluate
    trainer.evaluate = lambda received: shown.append("evaluate") or losses(received)
    trainer.run()
    assert shown == ["evaluating", "evaluate", "training"] * 2


def test_finite_update_between_resets_the_count(run_file, tmp_path, monkeypatch):
    plain = trainer_module.train_step

    def every_other_step_breaks(model, optimizer, *arguments):
        every_other_step_breaks.calls += 1
        if every_other_step_breaks.calls % 2:
            return outcome(float("nan"), float("nan"), 3, 9, is_good=False)
        return plain(model, optimizer, *arguments)

    every_other_step_breaks.calls = 0
    monkeypatch.setattr(trainer_module, "train_step", every_other_step_breaks)
    assert build(run_file, tmp_path, "train.max_nonfinite_steps=2").run() is None


def test_old_checkpoints_are_pruned(run_file, tmp_path):
    build(run_file, tmp_path, "train.save_steps=1", "train.save_total_limit=2").run()
    names = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-3", "checkpoint-4"]


@pytest.mark.parametrize(("setting", "calls"), [("none", 1), ("full", 2)])
def test_recompute_setting_runs_layers_again(run_file, tmp_path, setting, calls):
    trainer = build(
        run_file, tmp_path, f"train.recompute={setting}", "train.max_steps=1",
        "train.gradient_accumulation_steps=1",
    )  # fmt: skip
    counted = []
    for layer in (
        trainer.runner.model.decoder_layers[1].mlp,
        trainer.runner.model.vision_blocks[0].mlp,
    ):
        layer.register_forward_pre_hook(lambda *_: counted.append(1))
    trainer.run()
    assert len(counted) == 2 * calls


def test_batch_settings_reach_the_batches(run_file, tmp_path):
    trainer = build(
        run_file, tmp_path, "data.padding_side=left", "data.pad_to_multiple_of=32",
        "train.per_device_train_batch_size=6",
    )  # fmt: skip
    batch = next(trainer.data)
    assert batch["input_ids"].shape[0] == 6
    assert batch["input_ids"].shape[1] % 32 == 0
    assert batch["has_left_padding"]


def test_skipped_samples_are_counted(run_file, tmp_path):
    """One broken line among the good ones: an error by default, counted when told to skip."""
    data = tmp_path / "data.jsonl"
    lines = run_file.with_name("train.jsonl").read_text().splitlines()
    folder = run_file.parent
    lines = [line.replace("images/", f"{folder}/images/") for line in lines]
    data.write_text("\n".join([*lines[:5], '{"messages": ', *lines[5:]]) + "\n")
    settings = [f"data.train=[{data}]", "train.max_steps=1"]
    with pytest.raises(ValueError, match=r"data\.jsonl:6: broken JSON"):
        build(run_file, tmp_path / "out", *settings)
    build(run_file, tmp_path / "out", *settings, "data.on_bad_sample=skip").run()
    assert metrics_of(tmp_path / "out")[0]["skipped_samples"] == 1


def test_epochs_and_frozen_parts_from_the_configuration(run_file, tmp_path):
    """12 samples in steps of 2 x 2: one and a half passes are 4.5 steps, so 5."""
    trainer = build(
        run_file, tmp_path, "train.max_steps=null", "train.num_train_epochs=1.5",
        'model.freeze=["model.visual.*"]', "train.recompute=full",
    )  # fmt: skip
    assert trainer.num_steps == 5
    before = trainer.runner.model.hf_state_dict()
    trainer.run()
    for name, value in trainer.runner.model.hf_state_dict().items():
        assert (value == before[name]).all() == name.startswith("model.visual."), name
    with pytest.raises(ValueError, match="exceeds the 3 steps that"):
        build(
            run_file, tmp_path / "b", "train.max_steps=null", "train.num_train_epochs=1.0",
            "train.warmup_steps=4",
        )  # fmt: skip


def test_model_that_does_not_fit_its_processor_is_refused(run_file, tmp_path):
    with pytest.raises(ValueError, match="do not fit") as caught:
        build(
            run_file, tmp_path,
            "model.config.image_token_id=7", "model.config.vision_config.patch_size=8",
        )  # fmt: skip
    for part in (
        "image_token_id is 7 in the model and 278 in the tokenizer",
        "vision_config.patch_size is 8 in the model and 4 in the image processor",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="model.config: text_config.vocab_size is 270 but the"):
        build(run_file, tmp_path, "model.config.text_config.vocab_size=270")


def test_training_can_start_from_a_pretrained_folder(whole_run, run_file, tmp_path):
    start = load_file(whole_run / "final" / "model.safetensors")
    trainer = build(
        run_file, tmp_path, "model.config=null", f"model.pretrained={whole_run / 'final'}",
        "data.processor=null", "data.max_pixels=64",
    )  # fmt: skip
    for name, value in trainer.runner.model.hf_state_dict().items():
        np.testing.assert_array_equal(value, start[name], err_msg=name)
    assert next(trainer.data)["image_grid_thw"].tolist() == [[1, 2, 2]] * 2


def test_training_does_not_start_from_damaged_weights(whole_run, run_file, tmp_path):
    shutil.copytree(whole_run / "final", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    settings = ["model.config=null", f"model.pretrained={file.parent}", "data.processor=null"]
    with pytest.raises(RuntimeError, match=r"model\.pretrained .*model\.safetensors does not have"):
        build(run_file, tmp_path / "out", *settings)
    build(run_file, tmp_path / "out", *settings, "train.verify_checkpoint=false")


def test_profiled_steps_leave_a_trace_of_these_steps(run_file, tmp_path):
    trainer = build(run_file, tmp_path, "train.profile={start: 2, steps: 2}")
    recorded, plain = [], trainer.train_one_step

    def train_one_step():
        recorded.append(trainer.trace._profiler is not None)
        return plain()

    trainer.train_one_step = train_one_step
    trainer.run()
    assert recorded == [False, True, True, False]
    (file,) = (tmp_path / "profile").glob("rank0*.json")
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert any("matmul" in str(name) for name in names)


def test_a_run_that_ends_while_it_is_profiled_leaves_the_trace(run_file, tmp_path):
    build(run_file, tmp_path, "train.profile={start: 3, steps: 50}").run()
    assert list((tmp_path / "profile").glob("rank0*.json"))


def test_a_peak_that_is_set_gives_a_utilisation(run_file, tmp_path):
    build(run_file, tmp_path, "logging.device_peak_tflops=0.5", "train.max_steps=2").run()
    for line in run_metrics(tmp_path):
        assert 0 < line["mfu"] < 1
