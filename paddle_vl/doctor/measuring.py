"""Rounding and times of products on the device, and what Paddle's profiler sees of a call."""

import time
from collections.abc import Callable
from typing import Any

import paddle
from paddle import profiler

from paddle_vl.nn.examples import Dtype
from paddle_vl.parallel.bandwidth import synchronize

# 1 + 2^-12 has 12 bits behind the point: float32 keeps them, TF32 (10 bits) rounds to 1.
TF32_STEP, TERMS = 2.0**-12, 1024


def sum_of_products(dtype: Dtype, value: float) -> float:
    """An entry of a product of `TERMS` terms that are this value."""
    left = paddle.full([64, TERMS], value).astype(dtype)
    product = paddle.matmul(left, paddle.ones([TERMS, 64]).astype(dtype))
    return float(product[0, 0].astype("float32"))


def uses_tf32() -> bool:
    """Whether this process's float32 products run in TF32."""
    return abs(sum_of_products("float32", 1.0 + TF32_STEP) / TERMS - 1.0) < TF32_STEP / 2


def best_s(run: Callable[[], Any], times: int = 5) -> float:
    """The fastest of a few runs, in seconds, after one that is not counted."""
    run()
    seconds = []
    for _ in range(times):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return max(min(seconds), 1e-9)


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
        events.append((str(node.type).rpartition(".")[2], node.name))
        waiting += node.children_node
        for runtime in node.runtime_node:
            events.append(("runtime", runtime.name))
            for event in getattr(runtime, "device_node", ()):
                events.append((str(event.type).rpartition(".")[2], event.name))
    return events
