"""The doctor's examination of kernels.

Guarantees: every operation has an example, and every example an operation; all kernels pass; a
kernel with a wrong output, a wrong gradient, NaN or one gradient too few is found and named, and so
is a wrong plain implementation, or a kernel without a backward pass; a skipped dtype has a reason.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.doctor import kernels
from paddle_vl.doctor.check import Machine, run_check
from paddle_vl.doctor.example import EXAMPLES
from paddle_vl.doctor.examples import missing_examples, own_operations
from paddle_vl.nn.norm import rms_norm
from paddle_vl.nn.operations import operation


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine("cpu", 0, False, True, tmp_path)


def test_every_operation_has_an_example():
    assert missing_examples() == [], (
        "add them to paddle_vl/doctor/row_examples.py or attention_examples.py"
    )


def test_every_example_is_of_an_operation():
    names = {operation.__name__ for operation in own_operations()}
    assert {name.split(".")[0] for name in EXAMPLES} <= names


def test_an_operation_without_an_example_is_a_finding(machine, monkeypatch):
    from paddle_vl.nn import operations

    monkeypatch.setattr(operations, "OPERATIONS", [])

    @operation
    def unheard_of(x):
        return x

    result = kernels.check_operation(unheard_of, machine)
    assert result.status == "wrong"
    assert "unheard_of" in result.found


def test_all_kernels_of_this_device_are_right(machine):
    for check in kernels.checks(machine):
        result = run_check(check, machine)
        assert result.status == "ok", (check.name, result.found)
        sides = {row["implementation"] for row in result.figures["table"]}
        assert "plain" in sides
        assert all(row["forward_ms"] > 0 for row in result.figures["table"])


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
        (no_gradient, "the number of gradients"),
    ],
)
def test_a_wrong_kernel_is_found(machine, monkeypatch, kernel, where):
    monkeypatch.setitem(rms_norm.kernels, "cpu", kernel)
    result = kernels.check_operation(rms_norm, machine)
    assert result.status == "wrong"
    assert "rms_norm (kernel, float32) is off by" in result.found
    assert where in result.found
    assert "the plain implementation is right" in result.remedy


def test_a_kernel_without_a_backward_pass_is_compared_forward(machine, monkeypatch):
    def twice(x, weight_C, epsilon):
        return 2 * rms_norm.plain(x, weight_C, epsilon)

    for kernel, status in ((rms_norm.plain, "ok"), (twice, "wrong")):
        monkeypatch.setattr(rms_norm, "kernels_without_gradient", {"cpu": kernel}, raising=False)
        result = kernels.check_operation(rms_norm, machine)
        rows = {row["implementation"]: row for row in result.figures["table"]}
        assert (result.status, rows["inference"]["backward_ms"]) == (status, None)
        assert rows["kernel"]["is_within"]


def test_a_wrong_plain_implementation_is_found_by_the_formula(machine, monkeypatch):
    own = rms_norm.plain
    monkeypatch.setattr(rms_norm, "plain", lambda x, w, e: 1.01 * own(x, w, e))
    result = kernels.check_operation(rms_norm, machine)
    assert result.status == "wrong"
    assert "against float64" in result.found


def test_bfloat16_is_skipped_on_a_cpu_with_the_reason(machine):
    from paddle_vl.doctor import precision

    tf32, bf16 = (run_check(check, machine) for check in precision.checks(machine))
    assert tf32.status == "info"
    assert (bf16.status, "bfloat16" in bf16.found) == ("skipped", True)
