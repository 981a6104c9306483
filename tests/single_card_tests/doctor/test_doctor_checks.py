"""What the doctor's checks find.

Guarantees: both wheels at once, a wheel of another version, a CPU wheel beside a card, and flags
that slow a run down or make it wrong are findings. All golden cases pass here; a changed loss,
logit, gradient or token is found and named; the stored files are small enough for a wheel and part
of it. Every operation has an example, and every example an operation; all kernels pass; a kernel
with a wrong output, a wrong gradient, NaN or one gradient too few is found and named, and so is one
of attention that is wrong for one head width, or NaN of queries that see no key. Collectives with
wrong values, a slow link, a topology that differs from one device, and host reads and copies in a
step are findings.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from safetensors.numpy import save_file

from paddle_vl.doctor import environment, golden, kernels, ranks
from paddle_vl.doctor.check import Machine, all_checks, chosen_checks, run_check
from paddle_vl.doctor.kernels import own_operations
from paddle_vl.nn import dispatch
from paddle_vl.nn.attention import causal_attention
from paddle_vl.nn.dispatch import Kernel, operation
from paddle_vl.nn.examples import EXAMPLES, HEAD_WIDTHS, name_of
from paddle_vl.nn.operations import rms_norm
from paddle_vl.parallel.bandwidth import Measure
from paddle_vl.testing.tiny_run import write_tiny_run
from paddle_vl.train import trainer
from paddle_vl.train.stop_signals import StopSignals

ROOT = Path(__file__).parents[3]
QWEN3_VL, QWEN3_5, *_ = golden.CASES


@pytest.fixture
def machine(tmp_path) -> Machine:
    """A CPU, with small sizes."""
    return Machine("cpu", 0, False, True, tmp_path)


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


@pytest.mark.parametrize("case", golden.CASES)
def test_hfs_case_passes(machine, case):
    result = golden.check_case(case, "float32", machine)
    assert result.status == "ok", result.found
    assert result.figures["error"] < 2e-5
    # Small enough for a wheel, and part of it.
    assert case.stat().st_size < 300_000
    assert '"paddle_vl.doctor" = ["cases/*"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("case", "name", "where"),
    [
        (QWEN3_VL, "loss", "loss by"),
        (QWEN3_VL, "logits", "logits by"),
        (QWEN3_VL, "grad.model.visual.blocks.1.attn.qkv.weight", "blocks.1.attn.qkv.wei"),
        (QWEN3_VL, "model.language_model.layers.1.self_attn.q_norm.weight", "from HF's"),
        (QWEN3_VL, "tokens", "greedy tokens"),
        (QWEN3_5, "model.language_model.layers.0.linear_attn.dt_bias", "from HF's"),
        (QWEN3_5, "grad.model.language_model.layers.2.linear_attn.A_log", "A_log by"),
        (QWEN3_5, "tokens", "greedy tokens"),
    ],
)
def test_a_changed_value_is_found(machine, tmp_path, case, name, where):
    arrays, config, made_with = golden.read_case(case)
    array = arrays[name].copy()
    array.flat[array.size // 2] += 1 if array.dtype == np.int64 else np.abs(array).max() * 1e-3
    file = tmp_path / "changed.safetensors"
    save_file({**arrays, name: array}, file, {"config": config, "made_with": made_with})
    result = golden.check_case(file, "float32", machine)
    assert result.status == "wrong"
    assert where in result.found
    assert result.remedy


def test_an_operation_without_an_example_is_a_finding(machine, monkeypatch):
    names = {name_of(operation) for operation in own_operations()}
    monkeypatch.setattr(dispatch, "OPERATIONS", [])

    @operation
    def unheard_of(x):
        return x

    result = kernels.check_operation(unheard_of, machine)
    assert result.status == "wrong"
    assert "unheard_of" in result.found
    examples = {name.split(".")[0] for name in EXAMPLES}
    assert examples <= names, "an example has no operation"


def test_all_kernels_of_this_device_are_right(machine):
    checks = all_checks()
    assert len({check.name for check in checks}) == len(checks)
    quick = {check.group for check in chosen_checks(checks, is_quick=True)}
    assert quick == {"environment", "golden", "kernels"}
    # A named check runs, quick or not.
    (named,) = chosen_checks(checks, ["ranks.bandwidth"], is_quick=True)
    assert named.name == "ranks.bandwidth"
    for check in [check for check in checks if check.group == "kernels"]:
        result = run_check(check, machine)
        if result.status == "info":
            assert "the plain operation runs" in result.found
            continue
        assert result.status == "ok", (check.name, result.found)
        assert {row["implementation"] for row in result.figures["table"]} == {"kernel"}
        widths = {row.get("head_width") for row in result.figures["table"]}
        assert widths == ({None} if "attention" not in check.name else {32, *HEAD_WIDTHS})


def wrong_output(x, weight_C, epsilon):
    return rms_norm.plain(x, weight_C, epsilon) + 0.01


def wrong_gradient(x, weight_C, epsilon):
    out = rms_norm.plain(x, weight_C, epsilon)
    # Equal values; the weight's gradient is off by a tenth.
    return out + 0.1 * (rms_norm.plain(x.detach(), weight_C, epsilon) - out.detach())


def nan(x, weight_C, epsilon):
    out = rms_norm.plain(x, weight_C, epsilon)
    return out + paddle.to_tensor(np.float32("nan"))


def no_gradient(x, weight_C, epsilon):
    return rms_norm.plain(x, weight_C.detach(), epsilon)


@pytest.mark.parametrize(
    ("kernel", "where"),
    [
        (wrong_output, "the output"),
        (wrong_gradient, "gradient 1"),
        (nan, "the output"),
        (no_gradient, "gradient 1"),
    ],
)
def test_a_wrong_kernel_is_found(machine, monkeypatch, kernel, where):
    monkeypatch.setattr(rms_norm, "kernels", [Kernel("cpu", "Paddle", kernel)])
    result = kernels.check_operation(rms_norm, machine)
    assert result.status == "wrong"
    assert "rms_norm (kernel, float32) is off by" in result.found
    assert where in result.found
    assert "the plain implementation is right" in result.remedy


def test_on_a_gpu_the_plain_operation_is_compared_too(machine):
    result = kernels.check_operation(rms_norm, replace(machine, device="gpu"))
    sides = [row["implementation"] for row in result.figures["table"]]
    assert (result.status, sides) == ("ok", ["plain", "kernel"])


def wrong_for_one_width(q, k, v, bias=None, packed=None):
    out = causal_attention.plain(q, k, v, bias, packed)
    return out + 0.1 * (q - q.detach()) if q.shape[-1] == 80 and bias is None else out


def nan_where_nothing_is_seen(q, k, v, bias=None, packed=None):
    """In the first query of the second sample, which is padding."""
    out = causal_attention.plain(q, k, v, bias, packed)
    spoiled = np.zeros([2, q.shape[1], 1, 1], np.float32)
    spoiled[1, 0] = np.nan if bias is not None else 0.0
    return out + paddle.to_tensor(spoiled)


@pytest.mark.parametrize(
    ("kernel", "form", "widths"),
    [
        (wrong_for_one_width, "causal_attention", {80}),
        (nan_where_nothing_is_seen, "causal_attention.padded", {32, *HEAD_WIDTHS}),
    ],
)
def test_faults_of_one_width_and_in_padding_are_found(machine, monkeypatch, kernel, form, widths):
    monkeypatch.setattr(causal_attention, "kernels", [Kernel("cpu", "Paddle", kernel)])
    rows = kernels.check_operation(causal_attention, machine).figures["table"]
    bad = [row for row in rows if not row["is_within"]]
    assert form in {row["form"] for row in bad}
    assert {row["head_width"] for row in bad} == widths
    assert {row["implementation"] for row in bad} == {"kernel"}


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


def test_numbers_reads_and_copies_of_a_run_that_differs_are_found(tmp_path, monkeypatch):
    write_tiny_run(tmp_path, ranks.STEPS, {"num_hidden_layers": 1})
    job = {"folder": str(tmp_path), "micro_batches": 2}

    def train(name: str, **settings: Any) -> dict[str, list[str]]:
        with StopSignals() as stop:
            return ranks._train(job, name, settings, stop)

    own = trainer.train_step

    def reads_and_copies(runner, optimizer, *rest):
        next(iter(runner.model.parameters())).sum().item()
        paddle.to_tensor(np.ones([2], np.float32))
        return own(runner, optimizer, *rest)

    assert train("one") == {"host_reads": [], "device_copies": []}
    assert ranks.run_difference(tmp_path / "one", tmp_path / "one").error == 0.0
    monkeypatch.setattr(trainer, "train_step", reads_and_copies)
    # The same start with another decay: losses agree in the first step, parameters do not.
    places = train("other", **{"train.weight_decay": 0.3})
    assert [(what, len(found)) for what, found in places.items()] == [
        ("host_reads", 1),
        ("device_copies", 1),
    ]
    worst = ranks.run_difference(tmp_path / "other", tmp_path / "one")
    assert worst.error > 1e-4
    row = {"topology": "dp2", "in": worst.name, "host_reads": 1, "device_copies": 0, "at": ""}
    result = ranks.topologies_result([row | {"error": worst.error}], 1e-5)
    assert (result.status, "dp2 differ" in result.found) == ("wrong", True)
    row["error"] = 0.0
    assert ranks.topologies_result([row], 1e-5).status == "ok"
    result = ranks.topologies_result([row | {"at": "train/trainer.py:9"}], 1e-5)
    assert result.status == "wrong"
    assert "reads the device 1 times and copies to it 0 times, at train/tra" in result.found
