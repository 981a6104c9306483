"""What the doctor's other checks find.

Guarantees: both wheels at once, a wheel of another version, a CPU wheel beside a card, and flags
that slow a run down or make it wrong are findings; so are collectives with wrong values, a slow
link, a topology that differs from one device, a resumed run with other bits, a cache that changes
tokens, copies that come too late, and host reads in a step.
"""

import re
import shutil
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.doctor import environment, models, ranks, steps
from paddle_vl.doctor.check import all_checks, chosen_checks
from paddle_vl.doctor.kernels import attention_backend, attention_backends, operators_of
from paddle_vl.doctor.steps import spoiled_rounds
from paddle_vl.parallel.bandwidth import Measure
from paddle_vl.testing import tiny_qwen3_vl
from paddle_vl.testing.tiny_run import write_tiny_run
from paddle_vl.train.build import build_trainer


@pytest.mark.parametrize(
    ("wheels", "version", "has_card", "device", "words"),
    [
        (["paddlepaddle", "paddlepaddle-gpu"], "3.3.1", True, "gpu", "both installed"),
        (["paddlepaddle"], "3.2.0", False, "cpu", "paddle is 3.2.0"),
        (["paddlepaddle"], "3.3.1", True, "cpu", "computes on the CPU"),
        (["paddlepaddle-gpu"], "3.3.1", True, "gpu", None),
        (["paddlepaddle"], "3.3.1", False, "cpu", None),
    ],
)
def test_wheels_that_do_not_fit_are_found(wheels, version, has_card, device, words):
    problem = environment.version_problem(wheels, version, has_card, device)
    assert (problem is None) if words is None else words in problem[0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"FLAGS_check_nan_inf": True}, "waits for the device"),
        ({"FLAGS_gemm_use_half_precision_compute_type": True}, "half precision"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING"),
        ({"FLAGS_check_nan_inf": False, "CUDA_LAUNCH_BLOCKING": "0"}, None),
    ],
)
def test_flags_that_spoil_a_run_are_found(values, words):
    problem = environment.flag_problem(values)
    assert (problem is None) if words is None else words in problem[0]


def test_secrets_in_variables_are_not_shown(machine, monkeypatch):
    monkeypatch.setenv("PADDLE_VL_TOKEN", "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    result = environment.check_flags(machine)
    assert "hunter2" not in str(result)
    assert result.figures["variables"]["NCCL_DEBUG"] == "WARN"


def measures(**changes: Any) -> list[Measure]:
    found = [Measure("all_reduce", (0, 1, 2), 4.0, 1.0, 100.0, True)]
    found += [Measure("message", (0, i), 4.0, 1.0, 40.0, True) for i in (1, 2)]
    return [*found, Measure("message", (1, 2), 4.0, 1.0, 40.0, True)._replace(**changes)]


def test_bandwidth_with_wrong_values_or_a_slow_link_is_found():
    assert ranks.bandwidth_result(measures()).status == "ok"
    spoiled = ranks.bandwidth_result(measures(is_right=False))
    assert "message over ranks [1, 2] gave wrong values" in spoiled.found
    slow = ranks.bandwidth_result(measures(gb_per_s=3.0))
    assert "from rank 1 to 2 far below the others" in slow.found
    assert {spoiled.status, slow.status} == {"wrong"}


def test_bandwidth_of_two_ranks_has_every_collective_and_message(machine):
    answer = ranks._on_ranks(machine, "bandwidth", 2, {"elements": 1 << 10})
    assert isinstance(answer, list), answer
    result = ranks.bandwidth_result([Measure(**entry) for entry in answer])
    assert result.status == "ok"
    assert re.search(r"reduce_scatter .*, all_to_all .*, messages .* GB/s", result.found)


def test_a_loss_curve_that_falls_behind_is_found():
    wide = list(np.linspace(4.0, 1.0, 50))
    narrow = [value + 0.01 for value in wide]
    assert models.curve_result(wide, narrow, "bfloat16").status == "ok"
    for step, value in ((20, 3.3), (49, float("nan"))):
        narrow = [*wide[:step], value, *wide[step + 1 :]]
        result = models.curve_result(wide, narrow, "bfloat16")
        assert (result.status, f"in step {step + 1} " in result.found) == ("wrong", True)


def test_losses_of_the_curve_fall():
    losses = models.losses("float32", 4)
    assert losses == sorted(losses, reverse=True)


def test_every_topology_uses_all_ranks_and_every_axis_occurs():
    for number in (2, 4, 8):
        found = ranks.topologies(number)
        for name, settings in found.items():
            axes = ("dp", "mp", "pp", "sharding")
            degrees = [settings.get(f"parallel.{axis}_degree", 1) for axis in axes]
            assert np.prod(degrees) == number, name
        text = " ".join(found)
        assert all(axis in text for axis in ("dp", "mp", "pp", "stage 3", "ep", "sequence"))


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A tiny run of `ranks.STEPS` steps."""
    file = write_tiny_run(tmp_path_factory.mktemp("run"), ranks.STEPS, {"num_hidden_layers": 1})
    build_trainer(load_run_config(file)).run()
    return file


def test_a_topology_whose_numbers_differ_is_found(finished_run, tmp_path):
    out = finished_run.parent / "out"
    assert ranks.run_difference(out, out).error == 0.0
    # The same start with another decay: losses agree in the first step, parameters do not.
    settings = [f"train.output_dir={tmp_path / 'other'}", "train.weight_decay=0.3"]
    build_trainer(load_run_config(finished_run, settings)).run()
    worst = ranks.run_difference(tmp_path / "other", out)
    assert worst.error > 1e-4
    row = {"topology": "dp2", "error": worst.error, "in": worst.name, "is_within": False}
    result = ranks.topologies_result([row], 1e-5)
    assert (result.status, "dp2 differ" in result.found) == ("wrong", True)
    number, differing = models.compared_bits(tmp_path / "other/checkpoint-2", out / "checkpoint-2")
    assert 0 < len(differing) <= number


def test_a_missing_tensor_of_a_resumed_run_is_found(finished_run, tmp_path):
    from safetensors.numpy import load_file, save_file

    checkpoint = finished_run.parent / "out" / f"checkpoint-{ranks.STEPS}"
    shutil.copytree(checkpoint, tmp_path / "copy")
    assert models.compared_bits(tmp_path / "copy", checkpoint)[1] == []
    file = sorted((tmp_path / "copy").glob("optimizer*.safetensors"))[0]
    arrays = load_file(file)
    name = next(iter(arrays))
    del arrays[name]
    save_file(arrays, file)
    assert models.compared_bits(tmp_path / "copy", checkpoint)[1] == [name]


def test_a_simulated_topology_that_differs_is_found(machine):
    def forgets_a_rank(placement, **experts):
        model = tiny_qwen3_vl(placement, **experts)
        if getattr(placement.ops, "mp_group", None) is not None:
            weight = model.language_model.norm.weight
            weight.set_value(weight * 1.01)
        return model

    result = models.simulated_qwen3_vl(machine, forgets_a_rank)
    assert result.status == "wrong"
    assert "mp_degree 2" in result.found


def test_a_cache_that_changes_tokens_is_found(machine, monkeypatch):
    assert models.generation(machine).status == "ok"
    model_class = type(tiny_qwen3_vl())
    own = model_class.generate

    def forgets(self, **batch):
        tokens = own(self, **batch)
        # What a stale entry of the cache does to the second prompt.
        tokens[1:, -1] = (tokens[1:, -1] + 1) % self.config.text_config.vocab_size
        return tokens

    monkeypatch.setattr(model_class, "generate", forgets)
    result = models.generation(machine)
    assert result.status == "wrong"
    assert "batch of 2" in result.found
    assert "of prompt 1 is" in result.found


class _HostDevice:
    """A device whose copies happen when the compute stream waits for them, or too late."""

    def __init__(self, pins: bool = True, waits: bool = True):
        self.pins, self.waits, self.pending = pins, waits, []
        self.compute = self.copies = self

    def pinned(self, array):
        return array.copy() if self.pins else array

    def empty(self, shape, dtype):
        return paddle.zeros(shape, dtype)

    def copy(self, pairs):
        self.pending += pairs

    def record_event(self):
        return self

    def wait_event(self, event):
        if self.waits:
            self.synchronize()

    def query(self):
        return True

    def synchronize(self):
        for source, target in self.pending:
            target.set_value(np.resize(source, target.shape))
        self.pending = []


def test_copies_that_race_are_found(monkeypatch):
    monkeypatch.setattr(steps, "_ELEMENTS", (1 << 10, 1 << 8))
    assert spoiled_rounds(_HostDevice(), 4, lambda: None) == []
    assert spoiled_rounds(_HostDevice(pins=False), 4, lambda: None) == [0, 1, 2, 3]
    assert spoiled_rounds(_HostDevice(waits=False), 4, lambda: None) == [0, 1, 2, 3]


def test_a_steady_step_is_counted_and_host_reads_and_copies_are_found(machine, monkeypatch):
    from paddle_vl.train import trainer

    result = steps.step_counts(machine)
    assert result.status == "ok", result.found
    assert result.figures["per_step"]["operators"] > 100
    own = trainer.train_step

    def reads_and_copies(runner, optimizer, *rest):
        next(iter(runner.model.parameters())).sum().item()
        paddle.to_tensor(np.ones([2], np.float32))
        return own(runner, optimizer, *rest)

    monkeypatch.setattr(trainer, "train_step", reads_and_copies)
    shutil.rmtree(machine.folder / "counts")
    result = steps.step_counts(machine)
    assert result.status == "wrong"
    assert (
        "1 host reads beside its norm, 1 copies to the device beside its batches; the host"
        in result.found
    )


def test_what_holds_a_steady_step_up_is_named():
    assert steps.step_problem([], [], {steps.WAITS: 1.5, "launches": 900}) is None
    assert steps.step_problem([], [], {steps.WAITS: 3.0}) == "the host waits 3 times for the device"
    assert steps.step_problem(["a.py:1"], ["b.py:2"], {}) == "the host reads the device at a.py:1"
    assert steps.step_problem([], ["b.py:2"], {}) == "the host copies to the device at b.py:2"


def test_each_form_of_attention_is_watched(machine):
    rows = attention_backends(machine).figures["table"]
    forms = {"causal_attention", "causal_attention.packed", "equal_segments_attention"}
    assert forms <= {row["form"] for row in rows}
    x = paddle.ones([2, 2])
    names = operators_of(lambda: paddle.nn.functional.softmax(paddle.matmul(x, x)))
    assert attention_backend(names) == "matmul + softmax"
    assert attention_backend(["matmul", "flash_attn"]) == "flash_attn"


def test_names_are_unique_and_quick_checks_are_a_part():
    checks = all_checks()
    assert len({check.name for check in checks}) == len(checks)
    quick = chosen_checks(checks, is_quick=True)
    assert {check.group for check in quick} >= {"environment", "kernels", "golden", "generation"}
    assert len(quick) < len(checks)
    # A named check runs, quick or not.
    (named,) = chosen_checks(checks, ["ranks.bandwidth"], is_quick=True)
    assert named.name == "ranks.bandwidth"
