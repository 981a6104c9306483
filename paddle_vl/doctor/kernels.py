"""Every operation of `paddle_vl.nn` on this device, forward and backward, against float32.

The reference is the plain implementation in float32 on the host's CPU, from inputs that are rounded
to the dtype under test; and the formula in float64, where an example has one. The plain
implementation and the device's kernel are both compared: where both are wrong it is Paddle or the
driver, where one is wrong it is that one.
"""

import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, profiler

import paddle_vl.nn

# Its models have operations of their own.
import paddle_vl.testing
from paddle_vl.doctor.check import CHECKS, Check, Machine, Result, check, info, ok, wrong
from paddle_vl.doctor.environment import best_s, uses_tf32
from paddle_vl.nn.dispatch import OPERATIONS, Operation, use_kernels
from paddle_vl.nn.examples import (
    ATTENTION,
    COMPARED,
    HEAD_WIDTHS,
    OUTPUT,
    PRODUCTS,
    QUICK,
    TIMED,
    Dtype,
    Inputs,
    Make,
    Sizes,
    examples_of,
    name_of,
    tensors,
    tensors_among,
    values_and_gradients,
)
from paddle_vl.testing.comparison import differences
from paddle_vl.train.gpu_settings import FLASH_VERSION, Gpu
from paddle_vl.train.memory_needed import available_memory

_SEED = 7
_EXACT = f"{OUTPUT}, against float64"
# Bytes of device memory for the sizes of a real model.
_ROOM = 30e9
# Largest error relative to the largest entry, forward and backward. Products in TF32 keep 10 bits.
BOUNDS = {"float32": 2e-5, "bfloat16": 2e-2, "tf32": 5e-3}
# Parts of the names of Paddle's attention kernels.
_FUSED = ("flash", "efficient_attention", "fused_attention", "fmha")
_COMPOSED = {"softmax", "matmul", "einsum"}
# Forms that a bfloat16 training step of the default settings runs, and that have fused kernels.
_MUST_BE_FUSED = ("causal_attention", "causal_attention.packed", "equal_segments_attention")


def own_operations() -> list[Operation]:
    """The operations of this package, not those that a user's code has added."""
    # An operation is registered when its module is imported.
    for module in pkgutil.walk_packages(paddle_vl.nn.__path__, "paddle_vl.nn."):
        import_module(module.name)
    return [op for op in OPERATIONS if op.__module__.startswith("paddle_vl.")]


def check_operation(operation: Operation, machine: Machine) -> Result:
    """Compare and time all forms of an operation."""
    forms = examples_of(operation).items()
    rows = [row for form in forms for row in _compared(operation, *form, machine)]
    if not rows:
        return wrong(
            f"{name_of(operation)} has no example inputs",
            "add some to the tables of paddle_vl/nn/examples.py",
        )
    worst = max(rows, key=lambda row: row["error"] / row["bound"])
    if bad := [row for row in rows if not row["is_within"]]:
        sides = {row["implementation"] for row in bad}
        who = "both are wrong: Paddle, its libraries or the driver"
        if sides == {"plain"}:
            who = "the kernel is right, the plain implementation is not: Paddle or the driver"
        elif "plain" not in sides:
            who = "the plain implementation is right, the kernel is not"
        return wrong(
            f"{worst['form']} ({worst['implementation']}, {worst['dtype']}) is off by "
            f"{worst['error']:.2g} of its largest entry {worst['in']}, more than "
            f"{worst['bound']:.0e}",
            f"{who}; training with it gives wrong numbers, so report this before a run",
            table=rows,
        )
    timed = [row for row in rows if "forward_ms" in row]
    fastest = min(timed, key=lambda row: row["forward_ms"] + row["backward_ms"])
    speed = f"{fastest['gb_per_s']:.3g} GB/s"
    if "tflop_per_s" in fastest:
        speed += f" and {fastest['tflop_per_s']:.3g} TFLOP/s"
    return ok(
        f"{len(rows)} comparisons, error at most {worst['error']:.1e} (bound "
        f"{worst['bound']:.0e}); {speed}",
        table=rows,
    )


def _compared(
    operation: Operation, name: str, make: Make, machine: Machine
) -> Iterator[dict[str, Any]]:
    """A row for each size, dtype and implementation of one form."""
    sizes = timed_sizes = QUICK if machine.is_quick else COMPARED
    if machine.device == "gpu" and not machine.is_quick and available_memory()[0] > _ROOM:
        timed_sizes = TIMED
    is_attention = name in ATTENTION
    cases: list[tuple[Sizes, Dtype]] = [(sizes, dtype) for dtype in machine.dtypes]
    if is_attention:
        # Kernels of attention are made for each width, on a GPU in half precision alone.
        widths = (replace(sizes, head_width=width) for width in HEAD_WIDTHS)
        cases.extend((own, machine.dtypes[-1]) for own in widths)
    for own, dtype in cases:
        inputs = _rounded(make(np.random.default_rng(_SEED), own), dtype)
        with on_host(), use_kernels("plain"):
            wanted = values_and_gradients(operation, inputs)
        if inputs.exact is not None:
            exact = (x.astype(np.float64) if _is_float(x) else x for x in inputs.args)
            wanted[_EXACT] = inputs.exact(*exact).ravel()
        is_tf32 = dtype == "float32" and name in PRODUCTS and uses_tf32()
        bound = BOUNDS["tf32" if is_tf32 else dtype]
        for side in _sides(operation, is_attention and dtype == "bfloat16", machine):
            with _implementation(side):
                found = values_and_gradients(operation, inputs, dtype)
            if inputs.exact is not None:
                found[_EXACT] = found[OUTPUT]
            worst = differences(found, wanted)[0]
            yield {
                "form": name.strip("_"),
                "implementation": side,
                "dtype": dtype,
                **({"head_width": own.head_width} if is_attention else {}),
                "error": worst.error,
                "in": worst.name,
                "bound": bound,
                "is_within": worst.error <= bound,
                **(_speed(operation, make, timed_sizes, dtype, side) if own is sizes else {}),
            }


def _sides(operation: Operation, may_have_version_3: bool, machine: Machine) -> list[str]:
    """The implementations of an operation on this device.

    `kernel_3` is the kernel with FlashAttention 3, where `kernel` is with 2.
    """
    sides = ["plain"]
    if operation.kernels_on(machine.device):
        gpu = Gpu.current()
        has_both = may_have_version_3 and gpu is not None and gpu.has_version_3
        sides += ["kernel", "kernel_3"] if has_both else ["kernel"]
    return sides


@contextmanager
def _implementation(side: str) -> Iterator[None]:
    """Inside the block operations take this implementation; a backward pass must run inside too."""
    with ExitStack() as stack:
        if side == "plain":
            stack.enter_context(use_kernels("plain"))
        elif paddle.get_device().startswith("gpu"):
            stack.callback(paddle.set_flags, paddle.get_flags(FLASH_VERSION))
            paddle.set_flags({FLASH_VERSION: 3 if side == "kernel_3" else 2})
        yield


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
        if _is_float(value) and dtype != "float32" and i not in inputs.tables
        else value
        for i, value in enumerate(inputs.args)
    )
    return replace(inputs, args=args)


def _is_float(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.float32


def _speed(
    operation: Operation, make: Make, sizes: Sizes, dtype: Dtype, side: str
) -> dict[str, Any]:
    """Times of forward and backward, bytes of inputs and outputs and operations per second."""
    inputs = make(np.random.default_rng(_SEED), sizes)
    args = tensors(inputs, dtype)
    with _implementation(side):
        outputs = tensors_among(operation(*args))
        forward_s = best_s(lambda: operation(*args))
        ones = [paddle.ones_like(out) for out in outputs]
        both_s = best_s(lambda: paddle.autograd.backward(tensors_among(operation(*args)), ones))
    given = [x for x in args if isinstance(x, Tensor)]
    size = sum(x.size * x.element_size() for x in [*given, *outputs])
    return {
        "forward_ms": 1e3 * forward_s,
        "backward_ms": 1e3 * max(0.0, both_s - forward_s),
        "gb_per_s": size / forward_s / 1e9,
        **({"tflop_per_s": inputs.work / forward_s / 1e12} if inputs.work else {}),
    }


CHECKS.extend(
    Check(
        f"kernels.{name_of(operation).strip('_')}",
        f"{name_of(operation)} and its gradients, in each dtype and form",
        partial(check_operation, operation),
        limit_s=90.0,
    )
    for operation in own_operations()
)


@check("attention.backends")
def attention_backends(machine: Machine) -> Result:
    """The kernel that each form of attention takes."""
    sizes = QUICK if machine.device == "cpu" else COMPARED
    cases: list[tuple[int, Dtype]] = [(sizes.head_width, dtype) for dtype in machine.dtypes]
    cases.extend((width, dtype) for width in HEAD_WIDTHS for dtype in machine.dtypes[1:])
    rows, left = [], []
    for operation in own_operations():
        forms = [form for form in examples_of(operation).items() if form[0] in ATTENTION]
        for (form, make), (width, dtype) in product(forms, cases):
            args = tensors(make(np.random.default_rng(0), replace(sizes, head_width=width)), dtype)
            chosen = attention_backend(operators_of(partial(operation, *args)))
            rows.append({"form": form, "dtype": dtype, "head_width": width, "backend": chosen})
            must = machine.device == "gpu" and dtype == "bfloat16" and form in _MUST_BE_FUSED
            if must and not any(part in chosen for part in _FUSED):
                left.append(f"{form} of head width {width}")
    if left:
        return wrong(
            f"in bfloat16 {', '.join(left)} runs no fused attention kernel: memory grows with the "
            "square of the length",
            "check that the wheel has flash attention (compute capability 8.0 or more), "
            "FLAGS_flash_attn_version, and the head width (a multiple of 8, at most 256)",
            table=rows,
        )
    told = sorted({f"{row['dtype']}: {row['backend']}" for row in rows})
    return info("; ".join(told), table=rows)


def attention_backend(names: Sequence[str]) -> str:
    """The attention kernel among the operators of a call."""
    fused = next((name for name in names if any(part in name for part in _FUSED)), None)
    return fused or " + ".join(sorted(_COMPOSED & set(names))) or "not through Paddle"


def operators_of(run: Callable[[], Any]) -> list[str]:
    """Names of the operators of a call, in no order."""
    return [
        name.removesuffix(" kernel launch")
        for kind, name in profiled(run)
        if kind == "DygraphKernelLaunch"
    ]


def profiled(run: Callable[[], Any]) -> list[tuple[str, str]]:
    """Kind and name of every event of a call: operators, device kernels, copies, and calls of the
    runtime."""
    targets = [profiler.ProfilerTarget.CPU]
    if not paddle.get_device().startswith("cpu"):
        targets.append(profiler.ProfilerTarget.GPU)
    with profiler.Profiler(targets=targets, on_trace_ready=lambda trace: None) as trace:
        run()
    # Paddle types it as unset.
    result: Any = trace.profiler_result
    events, waiting = [], list(result.get_data().values())
    while waiting:
        node = waiting.pop()
        waiting += node.children_node
        events.append((str(node.type).rpartition(".")[2], node.name))
        for runtime in node.runtime_node:
            events.append(("runtime", runtime.name))
            device = getattr(runtime, "device_node", ())
            events += [(str(each.type).rpartition(".")[2], each.name) for each in device]
    return events
