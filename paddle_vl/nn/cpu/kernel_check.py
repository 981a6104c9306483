"""Comparison of the compiled kernels with the plain operations, run once when they are loaded.

The examples of each operation at small odd sizes: rows longer than a block of attention, grouped
key heads, masked and packed keys. Some tens of milliseconds.
"""

from dataclasses import replace

import numpy as np
import paddle

# Sets kernels of its own.
import paddle_vl.nn.block_attention  # noqa: F401
from paddle_vl.nn.cpu import kernels
from paddle_vl.nn.dispatch import OPERATIONS, Operation, use_kernels
from paddle_vl.nn.examples import Inputs, Make, Sizes, examples_of, values_and_gradients
from paddle_vl.nn.operations import dropout

# Most error of values and gradients, relative to the largest one of a tensor.
TOLERANCE = 1e-5
SIZES = Sizes(rows=9, length=150, width=50, heads=4, key_heads=2, head_width=12)


def differences() -> str:
    """Forms of the operations whose chosen kernels' values or gradients differ from the plain ones;
    empty if none does."""
    wrong = []
    for operation in compiled_operations():
        for name, make in examples_of(operation).items():
            error = largest_error(operation, inputs_of(operation, make))
            # A comparison with NaN is false.
            if not error <= TOLERANCE:
                wrong.append(f"{name} by {error:.1e}")
    return ", ".join(wrong)


def compiled_operations() -> list[Operation]:
    """Those with a compiled kernel."""
    return [of for of in OPERATIONS if "C" in [kernel.source for kernel in of.kernels]]


def inputs_of(operation: Operation, make: Make) -> Inputs:
    """An example at these sizes."""
    inputs = make(np.random.default_rng(2), SIZES)
    # Paddle's own kernel drops other entries, so examples drop none.
    return replace(inputs, args=(inputs.args[0], 0.4)) if operation is dropout else inputs


def largest_error(operation: Operation, inputs: Inputs) -> float:
    """Largest relative error of values and gradients, from the same random state."""
    results, state = [], paddle.get_rng_state()
    for device in ("plain", "cpu"):
        call = kernels.dropout if operation is dropout and device == "plain" else operation
        try:
            with use_kernels(device), paddle.enable_grad():
                results.append(values_and_gradients(call, inputs))
        finally:
            paddle.set_rng_state(state)
    wanted, found = results
    errors = [
        np.abs(found[name] - wanted[name]).max() / (np.abs(wanted[name]).max() + 1e-30)
        for name in wanted
    ]
    # NumPy's maximum keeps a NaN.
    return float(np.max(errors))
