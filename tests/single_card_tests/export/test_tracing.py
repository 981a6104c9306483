"""Operations in traced programs.

Guarantees: a traced program has the plain implementations, or kernels for CPUs that equal them
within float32 rounding on odd sizes; tables of the host are constants of a program; tracing makes
no operation; a method is converted once for all its layers.
"""

import numpy as np
import paddle
import pytest
from paddle.jit.dy2static.program_translator import FunctionCache
from paddle.static import InputSpec

from paddle_vl.export.tracing import kernels_for_cpu, tracing
from paddle_vl.nn.attention import RotaryTables, apply_rotary
from paddle_vl.nn.dispatch import OPERATIONS, use_kernels
from paddle_vl.nn.linear import Linear, biased_linear
from paddle_vl.nn.operations import layer_norm, rms_norm, swiglu
from paddle_vl.nn.transfer import host_table


def normal(*shape: int, seed: int = 0) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def rms_normed(x, weight_C):
    return rms_norm(x, weight_C, 1e-6)


def layer_normed(x, weight_C, bias_C):
    return layer_norm(x, weight_C, bias_C, 1e-6)


def rotated(q_TNH, k_TKH, angle_TF):
    tables = RotaryTables.of_angles(angle_TF)
    return paddle.concat(apply_rotary(q_TNH, k_TKH, tables), axis=1)


def product(x, weight, bias):
    return biased_linear(x, weight, bias)


def gated(gate, up):
    return swiglu(gate, up)


def halves_gated(halves):
    return swiglu(halves)


CALLS = {
    "rms_norm of tiny rows": (rms_normed, [normal(5, 8) * 1e-4, normal(8, seed=1)]),
    "rms_norm of one row": (rms_normed, [normal(1, 129) * 100, normal(129, seed=1)]),
    "layer_norm": (layer_normed, [normal(7, 33), normal(33, seed=1), normal(33, seed=2)]),
    "layer_norm far from zero": (
        layer_normed, [normal(5, 24) + 100.0, normal(24, seed=1), normal(24, seed=2)]
    ),
    "biased_linear": (product, [normal(5, 7), normal(7, 3, seed=1), normal(3, seed=2)]),
    "swiglu": (gated, [normal(5, 7) * 30, normal(5, 7, seed=1)]),
    "swiglu of halves": (halves_gated, [normal(5, 14)]),
    "apply_rotary": (
        rotated, [normal(5, 6, 8), normal(5, 2, 8, seed=1), normal(5, 4, seed=2) * 100]
    ),
}  # fmt: skip


def traced(call, inputs):
    specs = [InputSpec(x.shape if x.ndim == 1 else [None, *x.shape[1:]], "float32") for x in inputs]
    with tracing():
        return paddle.jit.to_static(call, full_graph=True, input_spec=specs)(*inputs)


@pytest.mark.parametrize("name", CALLS)
def test_kernels_of_programs_equal_the_plain_implementation(name):
    call, inputs = CALLS[name]
    with use_kernels("plain"):
        wanted = call(*inputs).numpy()
    # Relative to the largest: rows far from zero lose digits in their mean.
    limit = (2e-5 if "far" in name else 1e-6) * np.abs(wanted).max()
    number = len(OPERATIONS)
    assert np.abs(traced(call, inputs).numpy() - wanted).max() <= limit
    with kernels_for_cpu():
        assert np.abs(traced(call, inputs).numpy() - wanted).max() <= limit
    assert len(OPERATIONS) == number


def test_a_table_of_the_host_is_a_constant_of_a_program():
    table = host_table(lambda: np.arange(4, dtype=np.float32))
    kept = table()

    def call(x):
        return x + table()

    with tracing():
        program = paddle.jit.to_static(
            call, full_graph=True, input_spec=[InputSpec([None, 4], "float32")]
        ).main_program
    assert "builtin.parameter" not in {op.name() for op in program.global_block().ops}
    np.testing.assert_array_equal(traced(call, [paddle.ones([2, 4])])[0], 1 + np.arange(4))
    assert table() is kept


def test_a_method_is_converted_once_for_all_its_layers(monkeypatch):
    """Paddle 3.3 converts it for each layer and each call: an export took three times as long."""
    names, convert = [], FunctionCache._convert

    def counted(cache, function):
        names.append(function.__qualname__)
        return convert(cache, function)

    monkeypatch.setattr(FunctionCache, "_convert", counted)
    layers = [Linear(4, 4, bias=False) for _ in range(3)]

    def call(x):
        for layer in layers:
            x = layer(x)
        return x

    traced(call, [normal(2, 4)])
    assert names.count("Linear.forward") == 1
    assert FunctionCache._convert is counted
