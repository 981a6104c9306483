"""What the doctor's checks of the environment and of ranks find.

Guarantees: both wheels at once, a wheel of another version, a CPU wheel beside a card, and flags
that slow a run down or make it wrong are findings; so are collectives with wrong values, a slow
link, a topology that differs from one device, and host reads and copies in a step.
"""

import re
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_vl.config.load import load_run_config
from paddle_vl.doctor import environment, ranks
from paddle_vl.doctor.check import all_checks, chosen_checks
from paddle_vl.parallel.bandwidth import Measure
from paddle_vl.testing.tiny_run import write_tiny_run
from paddle_vl.train import trainer
from paddle_vl.train.build import build_trainer
from paddle_vl.train.stop_signals import StopSignals


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
    assert answer[0] == answer[1]
    result = ranks.bandwidth_result([Measure(**entry) for entry in answer[0]])
    assert result.status == "ok"
    assert re.search(r"reduce_scatter .*, all_to_all .*, messages .* GB/s", result.found)


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
    row = {"topology": "dp2", "error": worst.error, "in": worst.name}
    result = ranks.topologies_result([row], 1e-5)
    assert (result.status, "dp2 differ" in result.found) == ("wrong", True)


def test_reads_and_copies_of_a_steady_step_are_found(tmp_path, monkeypatch):
    file = write_tiny_run(tmp_path, ranks.STEPS, {"num_hidden_layers": 1})
    job = {"folder": str(file.parent), "micro_batches": 2}

    def places(name: str) -> dict[str, list[str]]:
        with StopSignals() as stop:
            return ranks._train(job, name, {}, stop)

    assert places("own") == {"host_reads": [], "device_copies": []}
    own = trainer.train_step

    def reads_and_copies(runner, optimizer, *rest):
        next(iter(runner.model.parameters())).sum().item()
        paddle.to_tensor(np.ones([2], np.float32))
        return own(runner, optimizer, *rest)

    monkeypatch.setattr(trainer, "train_step", reads_and_copies)
    found = places("spoiled")
    assert {what: len(each) for what, each in found.items()} == {
        "host_reads": 1,
        "device_copies": 1,
    }


def test_a_step_with_a_host_read_is_a_finding_that_names_the_place():
    row = {"topology": "dp2", "error": 0.0, "in": "loss", "host_reads": 2, "device_copies": 0}
    assert ranks.topologies_result([row | {"at": ""}], 1e-5).status == "ok"
    result = ranks.topologies_result([row | {"at": "train/trainer.py:9"}], 1e-5)
    assert result.status == "wrong"
    assert "reads the device 2 times and copies to it 0 times, at train/tra" in result.found


def test_names_are_unique_and_quick_checks_are_a_part():
    checks = all_checks()
    assert len({check.name for check in checks}) == len(checks)
    quick = chosen_checks(checks, is_quick=True)
    assert {check.group for check in quick} >= {"environment", "golden", "kernels"}
    assert len(quick) < len(checks)
    # A named check runs, quick or not.
    (named,) = chosen_checks(checks, ["ranks.bandwidth"], is_quick=True)
    assert named.name == "ranks.bandwidth"
