"""Which of Paddle's kernels each form of attention runs, by calling it and watching."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from paddle import _C_ops

from paddle_vl.doctor.check import Check, Dtype, Machine, Result, info, wrong
from paddle_vl.doctor.example import COMPARED, EXAMPLES, QUICK, tensors
from paddle_vl.doctor.examples import name_of, own_operations
from paddle_vl.nn.operations import Operation

# Parts of the names of Paddle's attention kernels.
_FUSED = ("flash", "efficient_attention", "fused_attention", "fmha")
_COMPOSED = ("softmax", "matmul", "einsum")
# Forms that a bfloat16 training step of the default settings runs, and that have fused kernels.
_MUST_BE_FUSED = ("causal_attention", "causal_attention.packed", "equal_segments_attention")


def checks(machine: Machine) -> list[Check]:
    return [
        Check(
            "attention.backends",
            "the kernel that each form of attention takes",
            partial(_backends),
            limit_s=60,
        )
    ]


def attention_forms() -> dict[str, Operation]:
    """Every form of attention that has an example, with its operation."""
    by_name = {name_of(operation): operation for operation in own_operations()}
    return {
        form: by_name[name]
        for form in EXAMPLES
        if "attention" in (name := form.split(".")[0]) and name in by_name
    }


def _backends(machine: Machine) -> Result:
    sizes = QUICK if machine.device == "cpu" else COMPARED
    dtypes: list[Dtype] = ["float32", "bfloat16"] if machine.has_bfloat16 else ["float32"]
    rows: list[dict[str, Any]] = []
    left_fused = []
    for form, operation in attention_forms().items():
        inputs = EXAMPLES[form].make(np.random.default_rng(0), sizes)
        for dtype in dtypes:
            args = tensors(inputs, dtype)
            with called_operators() as names:
                operation(*args)
            chosen = backend(names)
            rows.append(
                {
                    "form": form,
                    "dtype": dtype,
                    "implementation": machine.device
                    if machine.device in operation.kernels
                    else "plain",
                    "backend": chosen,
                }
            )
            is_half_on_gpu = machine.device == "gpu" and dtype == "bfloat16"
            if is_half_on_gpu and form in _MUST_BE_FUSED and not _is_fused(chosen):
                left_fused.append(form)
    figures: dict[str, Any] = {"table": rows}
    if machine.device == "gpu":
        figures["paddle_selects"] = paddle_selection(sizes.head_width)
    if left_fused:
        return wrong(
            f"in bfloat16 {', '.join(left_fused)} runs no fused attention kernel: memory grows "
            "with the square of the length",
            "check that the wheel has flash attention (compute capability 8.0 or more), "
            "FLAGS_flash_attn_version, and the head width (a multiple of 8, at most 256)",
            **figures,
        )
    told = sorted({f"{row['dtype']}: {row['backend']}" for row in rows})
    return info("; ".join(told), **figures)


def backend(names: list[str]) -> str:
    """The attention kernel among the operators of a call."""
    fused = [name for name in names if _is_fused(name)]
    if fused:
        return fused[0]
    composed = [name for name in dict.fromkeys(names) if name in _COMPOSED]
    return " + ".join(composed) or ", ".join(dict.fromkeys(names)) or "not through Paddle"


def _is_fused(name: str) -> bool:
    return any(part in name for part in _FUSED)


def paddle_selection(head_width: int) -> str:
    """Which implementation Paddle's own function takes for `scaled_dot_product_attention`."""
    from paddle.nn.functional import flash_attention

    select = getattr(flash_attention, "_select_sdp", None)
    return "unknown" if select is None else str(select(head_width))


@contextmanager
def called_operators() -> Iterator[list[str]]:
    """Collect the names of Paddle's operators that Python code calls while entered."""
    names: list[str] = []
    replaced = []

    def watched(name: str, own: Any) -> Any:
        @functools.wraps(own, assigned=("__name__", "__doc__"))
        def call(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            return own(*args, **kwargs)

        return call

    wanted = (*_FUSED, *_COMPOSED)
    for name in dir(_C_ops):
        if any(part in name for part in wanted) and callable(getattr(_C_ops, name)):
            replaced.append((name, getattr(_C_ops, name)))
            setattr(_C_ops, name, watched(name, replaced[-1][1]))
    try:
        yield names
    finally:
        for name, own in replaced:
            setattr(_C_ops, name, own)
