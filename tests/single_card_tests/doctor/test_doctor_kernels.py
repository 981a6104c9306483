"""The doctor's examination of kernels.

Guarantees: every operation has an example, and every example an operation; all kernels pass; a
kernel with a wrong output, a wrong gradient, NaN or one gradient too few is found and named, and so
is a wrong plain implementation, a kernel without a backward pass, one of attention that is wrong
for one head width, or NaN of queries that see no key; a skipped dtype has a reason.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.doctor import environment, kernels
from paddle_vl.doctor.check import all_checks, run_check
from paddle_vl.doctor.kernels import own_operations
from paddle_vl.nn.attention import causal_attention
from paddle_vl.nn.dispatch import Kernel, operation
from paddle_vl.nn.examples import EXAMPLES, HEAD_WIDTHS, name_of
from paddle_vl.nn.operations import rms_norm


def test_every_operation_has_an_example():
    names = {name_of(operation) for operation in own_operations()}
    assert names <= set(EXAMPLES), "add them to the tables of paddle_vl/nn/examples.py"


def test_every_example_is_of_an_operation():
    names = {name_of(operation) for operation in own_operations()}
    assert {name.split(".")[0] for name in EXAMPLES} <= names


def test_an_operation_without_an_example_is_a_finding(machine, monkeypatch):
    from paddle_vl.nn import dispatch

    monkeypatch.setattr(dispatch, "OPERATIONS", [])

    @operation
    def unheard_of(x):
        return x

    result = kernels.check_operation(unheard_of, machine)
    assert result.status == "wrong"
    assert "unheard_of" in result.found


def test_all_kernels_of_this_device_are_right(machine):
    for check in [check for check in all_checks() if check.group == "kernels"]:
        result = run_check(check, machine)
        assert result.status == "ok", (check.name, result.found)
        sides = {row["implementation"] for row in result.figures["table"]}
        assert "plain" in sides
        assert {row["implementation"] for row in result.figures["table"] if row.get("forward_ms")}
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


def test_a_wrong_plain_implementation_is_found_by_the_formula(machine, monkeypatch):
    own = rms_norm.plain
    monkeypatch.setattr(rms_norm, "plain", lambda x, w, e: 1.01 * own(x, w, e))
    result = kernels.check_operation(rms_norm, machine)
    assert result.status == "wrong"
    assert "against float64" in result.found


def test_bfloat16_is_skipped_on_a_cpu_with_the_reason(machine):
    (bf16,) = (check for check in all_checks() if check.name == "precision.bfloat16")
    assert environment.check_tf32(machine).status == "info"
    result = run_check(bf16, machine)
    assert (result.status, "bfloat16" in result.found) == ("skipped", True)
