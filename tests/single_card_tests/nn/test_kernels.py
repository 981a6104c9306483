"""The choice between an operation's plain implementation and its kernels.

Guarantees: the kernel is that of the first tensor's device; a device without a kernel and a traced
program get the plain implementation; a choice of plain implementations holds for the process, a
forced choice until its block ends, also nested or after an error. Tests of the operations and the
golden cases cover the results of kernels. Kernels without a backward pass run only where it is said
that no gradient is needed.
"""

import paddle
import pytest

from paddle_vl.nn import operations
from paddle_vl.nn.norm import rms_norm
from paddle_vl.nn.operations import (
    OPERATIONS,
    choose_kernels,
    chosen_kernels,
    operation,
    use_kernels,
    without_gradient,
)


@pytest.fixture
def doubled(monkeypatch):
    """An operation that reports which implementation ran."""
    monkeypatch.setattr(operations, "OPERATIONS", [])

    @operation
    def doubled(x, more=0):
        """Twice."""
        return "plain", 2 * x + more

    @doubled.register("cpu")
    def _doubled(x, more=0):
        return "cpu", x + x + more

    return doubled


def test_the_kernel_of_the_tensors_device_runs(doubled):
    name, value = doubled(paddle.ones([2]), more=1)
    assert name == "cpu"
    assert value.tolist() == [3, 3]
    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Twice.")


def test_without_a_kernel_the_plain_implementation_runs(doubled):
    del doubled.kernels["cpu"]
    assert doubled(paddle.ones([2]))[0] == "plain"


def test_plain_implementations_can_be_chosen_for_the_process(doubled):
    x = paddle.ones([2])
    try:
        choose_kernels("plain")
        assert chosen_kernels() == "plain"
        assert doubled(x)[0] == "plain"
        with use_kernels("cpu"):
            assert doubled(x)[0] == "cpu"
    finally:
        choose_kernels("fused")
    assert doubled(x)[0] == "cpu"
    with pytest.raises(ValueError, match="kernels is 'fast'; 'fused' or 'plain'"):
        choose_kernels("fast")


def test_kernels_without_a_backward_pass_run_only_where_no_gradient_is_needed(doubled):
    x = paddle.ones([2])

    @doubled.register("cpu", gradient=False)
    def _without(x, more=0):
        assert not paddle.is_grad_enabled()
        return "without", x * 2

    # Recomputed activations must round as the first pass.
    with paddle.no_grad():
        assert doubled(x)[0] == "cpu"
    with without_gradient():
        assert doubled(x)[0] == "without"
        with use_kernels("plain"):
            assert doubled(x)[0] == "plain"
    with pytest.raises(ValueError, match="stop"), without_gradient():
        raise ValueError("stop")
    assert doubled(x)[0] == "cpu"


def test_a_choice_can_be_forced(doubled):
    x = paddle.ones([2])
    with use_kernels("plain"):
        assert doubled(x)[0] == "plain"
        with use_kernels("cpu"):
            assert doubled(x)[0] == "cpu"
        with pytest.raises(ValueError, match="stop"), use_kernels("cpu"):
            raise ValueError("stop")
        assert doubled(x)[0] == "plain"
    with use_kernels("gpu"):
        assert doubled(x)[0] == "plain"
    assert doubled(x)[0] == "cpu"


def test_a_traced_program_gets_the_plain_implementation(doubled):
    paddle.enable_static()
    try:
        program = paddle.static.Program()
        with paddle.static.program_guard(program, paddle.static.Program()):
            x = paddle.static.data("x", [2, 3])
            assert doubled(x)[0] == "plain"
            rms_norm(x, paddle.static.data("weight", [3]), 1e-6)
            names = {op.name() for op in program.global_block().ops}
    finally:
        paddle.disable_static()
    assert "pd_op.sum" in names
    assert not {name for name in names if "py_layer" in name}


def test_every_kernel_is_for_a_known_device():
    found = {device for operation in OPERATIONS for device in operation.kernels}
    assert found == {"cpu", "gpu"}
    assert len({operation.__name__ for operation in OPERATIONS}) == len(OPERATIONS)
