"""Each operation's kernel of this device, forward and backward, against the plain operation.

The reference is the plain implementation in float32 on the host's CPU, from inputs that are rounded
to the dtype under test. On a GPU the plain implementation is compared as well: where both are wrong
it is Paddle or the driver, where one is wrong it is that one.
"""

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import paddle

import paddle_vl.nn

# Its models have operations of their own.
import paddle_vl.testing
from paddle_vl.doctor.check import CHECKS, Check, Machine, Result, info, ok, wrong
from paddle_vl.doctor.environment import uses_tf32
from paddle_vl.nn.dispatch import OPERATIONS, Operation, use_kernels
from paddle_vl.nn.examples import (
    ATTENTION,
    COMPARED,
    HEAD_WIDTHS,
    PRODUCTS,
    QUICK,
    Dtype,
    Inputs,
    Make,
    Sizes,
    examples_of,
    name_of,
    values_and_gradients,
)
from paddle_vl.testing.comparison import differences

_SEED = 7
# Largest error relative to the largest entry, forward and backward. Products in TF32 keep 10 bits.
BOUNDS = {"float32": 2e-5, "bfloat16": 2e-2, "tf32": 5e-3}


def own_operations() -> list[Operation]:
    """The operations of this package, not those that a user's code has added."""
    # An operation is registered when its module is imported.
    for module in pkgutil.walk_packages(paddle_vl.nn.__path__, "paddle_vl.nn."):
        import_module(module.name)
    return [op for op in OPERATIONS if op.__module__.startswith("paddle_vl.")]


def check_operation(operation: Operation, machine: Machine) -> Result:
    """Compare all forms of an operation."""
    forms = examples_of(operation).items()
    if not forms:
        return wrong(
            f"{name_of(operation)} has no example inputs",
            "add some to the tables of paddle_vl/nn/examples.py",
        )
    # The host's plain implementation is the reference.
    sides = ["plain"] * (machine.device == "gpu")
    sides += ["kernel"] * bool(operation.kernels_on(machine.device))
    if not sides:
        return info("the plain operation runs on this device, which has no kernel for it")
    rows = [row for form in forms for row in _compared(operation, *form, sides, machine)]
    worst = max(rows, key=lambda row: row["error"] / row["bound"])
    if bad := {row["implementation"] for row in rows if not row["is_within"]}:
        who = "both are wrong: Paddle, its libraries or the driver"
        if bad == {"plain"}:
            who = "the kernel is right, the plain implementation is not: Paddle or the driver"
        elif bad == {"kernel"}:
            who = "the plain implementation is right, the kernel is not"
        return wrong(
            f"{worst['form']} ({worst['implementation']}, {worst['dtype']}) is off by "
            f"{worst['error']:.2g} of its largest entry {worst['in']}, more than "
            f"{worst['bound']:.0e}",
            f"{who}; training with it gives wrong numbers, so report this before a run",
            table=rows,
        )
    return ok(
        f"{len(rows)} comparisons, error at most {worst['error']:.1e} (bound {worst['bound']:.0e})",
        table=rows,
    )


def _compared(
    operation: Operation, name: str, make: Make, sides: list[str], machine: Machine
) -> Iterator[dict[str, Any]]:
    """A row for each size, dtype and implementation of one form."""
    sizes = QUICK if machine.is_quick else COMPARED
    cases: list[tuple[Sizes, Dtype]] = [(sizes, dtype) for dtype in machine.dtypes]
    if name in ATTENTION:
        # Kernels of attention are made for each width, on a GPU in half precision alone.
        widths = (replace(sizes, head_width=width) for width in HEAD_WIDTHS)
        cases.extend((own, machine.dtypes[-1]) for own in widths)
    for own, dtype in cases:
        inputs = _rounded(make(np.random.default_rng(_SEED), own), dtype)
        with on_host(), use_kernels("plain"):
            wanted = values_and_gradients(operation, inputs)
        is_tf32 = dtype == "float32" and name in PRODUCTS and uses_tf32()
        bound = BOUNDS["tf32" if is_tf32 else dtype]
        for side in sides:
            # A backward pass must run inside too.
            with use_kernels("plain") if side == "plain" else nullcontext():
                found = values_and_gradients(operation, inputs, dtype)
            worst = differences(found, wanted)[0]
            yield {
                "form": name,
                "implementation": side,
                "dtype": dtype,
                **({"head_width": own.head_width} if name in ATTENTION else {}),
                "error": worst.error,
                "in": worst.name,
                "bound": bound,
                "is_within": worst.error <= bound,
            }


@contextmanager
def on_host() -> Iterator[None]:
    """Inside the block Paddle computes on the host's CPU."""
    device = paddle.get_device()
    paddle.set_device("cpu")
    try:
        yield
    finally:
        paddle.set_device(device)


def _rounded(inputs: Inputs, dtype: Dtype) -> Inputs:
    """Inputs whose floats are values of the dtype, as float32."""
    args = tuple(
        paddle.to_tensor(value).astype(dtype).astype("float32").numpy()
        if isinstance(value, np.ndarray) and value.dtype == np.float32 and i not in inputs.tables
        else value
        for i, value in enumerate(inputs.args)
    )
    return replace(inputs, args=args)


CHECKS.extend(
    Check(
        f"kernels.{name_of(operation)}",
        f"{name_of(operation)} and its gradients, in each dtype and form",
        partial(check_operation, operation),
        limit_s=90.0,
    )
    for operation in own_operations()
)
