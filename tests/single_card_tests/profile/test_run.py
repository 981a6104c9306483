"""Profiled steps of a real, tiny run.

Guarantees: micro-batches add up to one step with one update and its samples; warm-up steps are not
counted, and memory is reset after them; a peak above the limit ends the profile, also in warm-up;
weights equal those of the same steps without a profile; the command writes a result, prints it, and
changes nothing in the run's folder.
"""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from paddle_vl.cli.main import main
from paddle_vl.config.load import load_run_config
from paddle_vl.config.validate import rule_problems
from paddle_vl.processes import MemoryLimitError
from paddle_vl.profile.memory import MemoryPeak
from paddle_vl.profile.run import measure, profiled_config
from paddle_vl.profile.workload import ProfileSettings, Workload
from paddle_vl.train import phases
from paddle_vl.train.allocator import allocator_flags
from paddle_vl.train.build import build_trainer
from paddle_vl.train.phases import Phase
from tests.single_card_tests.train.tiny_run import write_tiny_run


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    return write_tiny_run(tmp_path_factory.mktemp("run"))


def trainer_of(run_file, *overrides: str):
    return build_trainer(load_run_config(run_file, overrides), writes=False)


class Meter:
    """Uses one more byte per step and records its resets."""

    source = "the test"

    def __init__(self, trainer):
        self.trainer, self.resets = trainer, []

    def reset(self) -> None:
        self.resets.append(self.trainer.step)

    def peak(self) -> MemoryPeak:
        return MemoryPeak(7, self.trainer.step)


def measured(trainer, **given):
    settings = {"rank": 0, "warmup_steps": 2, "steps": 3} | given
    return measure(trainer, Meter(trainer), **settings)


@pytest.mark.parametrize("count", [1, 3])
def test_micro_batches_add_up_to_one_step(run_file, monkeypatch, count):
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(phases, "time", clock)
    trainer = trainer_of(run_file, f"train.gradient_accumulation_steps={count}")
    (step,) = measured(trainer, steps=1).steps
    # Every clock reading adds a second. On a CPU the feed makes tensors, once for all
    # micro-batches; what is left for the device is copied inside the forward phase.
    assert step[Phase.HOST_TO_DEVICE.value] == 1 + count
    assert step[Phase.FORWARD.value] == 2 * count
    assert step[Phase.BACKWARD.value] == count
    for once in (Phase.DATA_WAIT, Phase.AGREEMENT, Phase.GRADIENT_SUM, Phase.CLIP):
        assert step[once.value] == 1
    # The norm's reading, and the update.
    assert step[Phase.OPTIMIZER.value] == 2
    # The first clock reading is the start of the step.
    assert sum(step.values()) == next(ticks) - 1


@pytest.mark.parametrize("limit", [1, 4])
def test_a_peak_above_the_limit_ends_the_profile(run_file, limit):
    trainer = trainer_of(run_file)
    with pytest.raises(MemoryLimitError, match="rank 0 uses"):
        measured(trainer, memory_limit=limit)
    assert trainer.step == limit + 1


def test_profiled_steps_train_as_others_do(run_file):
    profiled, plain = (
        trainer_of(run_file, "train.gradient_accumulation_steps=3") for _ in range(2)
    )
    meter = Meter(profiled)
    result = measure(profiled, meter, rank=0, warmup_steps=2, steps=3)
    assert (meter.resets, result.samples, len(result.steps)) == ([2], [6, 6, 6], 3)
    assert min(result.tokens) > 6
    assert (result.allocated, result.reserved, result.memory_source) == (7, 5, "the test")
    for _ in range(5):
        plain.train_one_step()
    expected = plain.runner.model.hf_state_dict()
    for name, value in profiled.runner.model.hf_state_dict().items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize("length", ["max_steps=9", "num_train_epochs=1", "max_tokens=99"])
def test_a_profile_has_its_own_length(run_file, tmp_path, length):
    config = load_run_config(
        run_file, ["train.max_steps=null", "train.warmup_steps=0", f"train.{length}"]
    )
    profiled = profiled_config(config, ProfileSettings(tmp_path, Workload()))
    assert profiled.train.max_steps == 25
    assert rule_problems(profiled) == []


def test_the_command_leaves_a_result_and_nothing_in_the_runs_folder(run_file, tmp_path, capfd):
    out = tmp_path / "profile"
    arguments = [str(run_file), "--out", str(out), "--warmup", "1", "--steps", "2"]
    assert main(["profile", *arguments, "train.max_steps=1"]) == 0
    result = json.loads((out / "profile.json").read_text())
    assert result["allocator_flags"] == allocator_flags()
    assert sum(result["phase_shares_percent"].values()) == pytest.approx(100)
    assert (result["warmup"], result["measured"], result["num_processes"]) == (1, 2, 1)
    assert (result["batch_size"], result["gradient_accumulation_steps"]) == (2, 2)
    assert result["samples_per_step"] == 4
    assert result["peak_reserved_gb_worst"] > result["peak_alloc_gb_worst"] > 0
    assert result["data_source"] == "the run's own"
    assert "samples/s" in capfd.readouterr().out
    assert not list(out.glob("rank-*"))
    assert not run_file.with_name("out").exists()


def test_the_command_trains_on_made_up_conversations(run_file, tmp_path):
    out = tmp_path / "profile"
    arguments = [str(run_file), "--out", str(out), "--warmup", "0", "--steps", "1", "--synthetic"]
    shapes = ["--cameras", "2", "--image-side", "16", "--answer-tokens", "9"]
    assert main(["profile", *arguments, *shapes]) == 0
    result = json.loads((out / "profile.json").read_text())
    assert (result["cameras"], result["data_source"]) == (2, "synthetic")


def test_a_profile_above_its_limit_says_so(run_file, tmp_path, capfd):
    arguments = ["--out", str(tmp_path), "--memory-limit-gb", "0.01"]
    assert main(["profile", str(run_file), *arguments]) == 1
    assert "above the limit of 0.01 GB" in capfd.readouterr().err
    (file,) = tmp_path.glob("rank-*")
    told = json.loads(file.read_text())
    assert (told["is_out_of_memory"], "MemoryLimitError: rank 0" in told["message"]) == (True, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cameras", "1", "2"], "several of them need --matrix"),
        (["--recompute", "full", "none"], "several of them need --matrix"),
        (["--cameras", "2"], "--synthetic makes samples with that many"),
        (["--repeats", "2"], "--repeats is about a matrix"),
        (["--warmup", "-1"], "--warmup -1"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(
    run_file, tmp_path, capfd, arguments, message
):
    assert main(["profile", str(run_file), "--out", str(tmp_path), *arguments]) == 1
    assert message in capfd.readouterr().err
