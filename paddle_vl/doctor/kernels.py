"""Every operation of `paddle_vl.nn` on this device, forward and backward, against float32.

The reference is the plain implementation in float32 on the host's CPU, from inputs that are rounded
to the dtype under test; and the formula in float64, where an example has one. The plain
implementation and the device's kernel are both compared: where both are wrong it is Paddle or the
driver, where one is wrong it is that one.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.doctor.check import Check, Dtype, Machine, Result, ok, wrong
from paddle_vl.doctor.example import (
    COMPARED,
    QUICK,
    TIMED,
    Example,
    Inputs,
    Sizes,
    nbytes,
    tensors,
)
from paddle_vl.doctor.examples import name_of, own_operations, variants
from paddle_vl.doctor.precision import uses_tf32
from paddle_vl.nn.operations import Operation, use_kernels
from paddle_vl.train.memory_needed import available_memory

_SEED = 7
_TIMES = 5
_LIMIT_S = 90.0
# Bytes of device memory for the sizes of a real model.
_ROOM = 30e9
# `inference`: a kernel without a backward pass, which generation runs.
Side = Literal["plain", "kernel", "inference"]


def checks(machine: Machine) -> list[Check]:
    return [
        Check(
            f"kernels.{name_of(operation).strip('_')}",
            f"{name_of(operation)} and its gradients, in each dtype and form",
            partial(check_operation, operation),
            limit_s=_LIMIT_S,
        )
        for operation in own_operations()
    ]


@dataclass(frozen=True)
class Values:
    """What a call gave, on the host, float32; gradients are None without a backward pass."""

    out: np.ndarray
    gradients: list[np.ndarray] | None


def check_operation(operation: Operation, machine: Machine) -> Result:
    """Compare and time all forms of an operation."""
    found = variants(operation)
    if not found:
        return wrong(
            f"{name_of(operation)} has no example inputs",
            "add some in paddle_vl/doctor/row_examples.py or attention_examples.py",
        )
    rows: list[dict[str, Any]] = []
    for name, example in found.items():
        rows += _compared(operation, name, example, machine)
    bad = [row for row in rows if not row["is_within"]]
    if bad:
        worst = max(bad, key=lambda row: _badness(row["error"]))
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
    worst = max(rows, key=lambda row: row["error"] / row["bound"])
    fastest = min(rows, key=lambda row: row["forward_ms"] + (row["backward_ms"] or 0.0))
    speed = [
        f"{fastest[key]:.3g} {unit}"
        for key, unit in (("gb_per_s", "GB/s"), ("tflop_per_s", "TFLOP/s"))
        if fastest.get(key)
    ]
    return ok(
        f"{len(rows)} comparisons, error at most {worst['error']:.1e} (bound {worst['bound']:.0e})"
        + (f"; {' and '.join(speed)}" if speed else ""),
        table=rows,
    )


def _badness(error: float) -> float:
    return np.inf if np.isnan(error) else error


def _compared(
    operation: Operation, name: str, example: Example, machine: Machine
) -> Iterator[dict[str, Any]]:
    sizes = QUICK if machine.is_quick else COMPARED
    inputs = example.make(np.random.default_rng(_SEED), sizes)
    timed = example.make(np.random.default_rng(_SEED), _timed_sizes(machine))
    own: tuple[Dtype, ...] = ("float32", "bfloat16") if machine.has_bfloat16 else ("float32",)
    dtypes = example.dtypes or own
    for dtype in dtypes:
        with _on_host():
            rounded = _rounded(inputs, dtype)
            wanted = _values(operation, rounded, "float32", "plain")
        exact = None if inputs.exact is None else inputs.exact(*map(_as_float64, rounded.args))
        for side in _sides(operation, machine):
            found = _values(operation, rounded, dtype, side)
            bound = example.bounds.of(dtype, example.has_products and uses_tf32())
            error, where = _error(found, wanted, exact)
            yield {
                "form": name.strip("_"),
                "implementation": side,
                "dtype": dtype,
                "error": error,
                "in": where,
                "bound": bound,
                # Written so that NaN is outside.
                "is_within": bool(error <= bound),
                **_speed(operation, timed, dtype, side),
            }


def _sides(operation: Operation, machine: Machine) -> list[Side]:
    sides: list[Side] = ["plain"]
    if machine.device in operation.kernels:
        sides.append("kernel")
    if machine.device in _inference_kernels(operation):
        sides.append("inference")
    return sides


def _inference_kernels(operation: Operation) -> Mapping[str | None, Callable[..., Any]]:
    """Kernels without a backward pass by device, of operations that have some."""
    return getattr(operation, "kernels_without_gradient", {})


@contextmanager
def _on_host() -> Iterator[None]:
    device = paddle.get_device()
    paddle.set_device("cpu")
    try:
        yield
    finally:
        paddle.set_device(device)


def _rounded(inputs: Inputs, dtype: Dtype) -> Inputs:
    """Inputs whose floats are values of the dtype, as float32."""
    if dtype == "float32":
        return inputs
    args = tuple(
        paddle.to_tensor(value).astype(dtype).astype("float32").numpy()
        if isinstance(value, np.ndarray) and value.dtype == np.float32 and i not in inputs.tables
        else value
        for i, value in enumerate(inputs.args)
    )
    return Inputs(args, inputs.tables, inputs.work, inputs.exact)


def _as_float64(value: Any) -> Any:
    is_float = isinstance(value, np.ndarray) and value.dtype == np.float32
    return value.astype(np.float64) if is_float else value


@contextmanager
def _implementation(operation: Operation, side: Side) -> Iterator[Callable[..., Any]]:
    """The function of a side; a backward pass must run inside too."""
    if side == "plain":
        with use_kernels("plain"):
            yield operation
    elif side == "kernel":
        yield operation
    else:
        device = paddle.get_device().split(":")[0]
        with paddle.no_grad():
            yield _inference_kernels(operation)[device]


def _values(operation: Operation, inputs: Inputs, dtype: Dtype, side: Side) -> Values:
    has_backward = side != "inference"
    args = tensors(inputs, dtype, has_backward)
    with _implementation(operation, side) as run:
        outputs = _outputs(run(*args))
        if has_backward:
            _backward(outputs)
    gradients = None
    if has_backward:
        gradients = [_host(x.grad) for x in args if _is_trained(x) and x.grad is not None]
    return Values(np.concatenate([_host(out).ravel() for out in outputs]), gradients)


def _outputs(result: Any) -> list[Tensor]:
    entries = result if isinstance(result, list | tuple) else [result]
    return [entry for entry in entries if isinstance(entry, Tensor)]


def _backward(outputs: Sequence[Tensor]) -> None:
    floats = [out for out in outputs if not out.stop_gradient]
    paddle.autograd.backward(floats, [_direction(out) for out in floats])


def _direction(out: Tensor) -> Tensor:
    """A gradient of the output with entries of both signs, the same on every device."""
    size = int(np.prod(out.shape))
    values = np.cos(np.arange(size, dtype=np.float64) * 1.7).astype(np.float32)
    return paddle.to_tensor(values.reshape(out.shape)).astype(out.dtype)


def _is_trained(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.stop_gradient


def _host(x: Tensor) -> np.ndarray:
    return x.detach().astype("float32").numpy()


def _error(found: Values, wanted: Values, exact: np.ndarray | None) -> tuple[float, str]:
    """The largest error relative to the largest entry, and where."""
    pairs = [("the output", found.out, wanted.out)]
    if exact is not None:
        pairs.append(("the output, against float64", found.out, exact.ravel()))
    if found.gradients is not None and wanted.gradients is not None:
        if len(found.gradients) != len(wanted.gradients):
            return np.inf, "the number of gradients"
        for number, (own, other) in enumerate(zip(found.gradients, wanted.gradients, strict=True)):
            pairs.append((f"gradient {number}", own, other))
    errors = []
    for where, own, other in pairs:
        if own.shape != other.shape:
            return np.inf, f"the shape of {where}"
        size = np.abs(other).max(initial=0.0)
        error = np.abs(own - other).max(initial=0.0)
        errors.append((float(error / size) if size else float(error), where))
    return max(errors, key=lambda pair: _badness(pair[0]))


def _timed_sizes(machine: Machine) -> Sizes:
    """Sizes of a real model on a GPU that has room for float32 scores, else the compared ones."""
    if machine.is_quick:
        return QUICK
    is_large = machine.device == "gpu" and available_memory()[0] > _ROOM
    return TIMED if is_large else COMPARED


def _speed(operation: Operation, inputs: Inputs, dtype: Dtype, side: Side) -> dict[str, Any]:
    """Times of forward and backward, bytes of inputs and outputs and operations per second."""
    args = tensors(inputs, dtype, side != "inference")
    backward_ms = None
    with _implementation(operation, side) as run:
        outputs = _outputs(run(*args))
        forward_s = best_s(lambda: run(*args))
        if side != "inference":
            directions = [paddle.ones_like(out) for out in outputs]
            both_s = best_s(lambda: paddle.autograd.backward(_outputs(run(*args)), directions))
            backward_ms = 1e3 * max(0.0, both_s - forward_s)
    given = [x for x in args if isinstance(x, Tensor)]
    size = nbytes([*given, *outputs])
    return {
        "forward_ms": 1e3 * forward_s,
        "backward_ms": backward_ms,
        "gb_per_s": size / forward_s / 1e9,
        **({"tflop_per_s": inputs.work / forward_s / 1e12} if inputs.work else {}),
    }


def best_s(run: Callable[[], Any]) -> float:
    """The fastest of a few runs, in seconds, after one that is not counted."""
    run()
    times = []
    for _ in range(_TIMES):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - begin)
    return max(min(times), 1e-9)


def synchronize() -> None:
    """Wait for the device."""
    if not paddle.get_device().startswith("cpu"):
        paddle.device.synchronize()
