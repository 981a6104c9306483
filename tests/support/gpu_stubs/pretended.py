"""Paddle's choice of attention kernels as on a GPU, and the stubs of `machine` in their places.

Paddle's own Python code runs (`nn/functional/sdpa.py`, `flash_attention.py`) and believes that
tensors lie on a GPU of the given compute capability. So which kernel a call takes, and what Paddle
asserts on the way, is its own.
"""

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, cast

import paddle
import pytest
from paddle import _C_ops

import paddle_vl.nn.gpu
from paddle_vl.nn.dispatch import use_kernels
from tests.support.gpu_stubs import attention  # noqa: F401  registers its stubs
from tests.support.gpu_stubs.machine import STUBS, KernelCall, Machine

FLASH_DTYPES = (paddle.float16, paddle.bfloat16)
_SDPA = importlib.import_module("paddle.nn.functional.sdpa")
_FLASH = importlib.import_module("paddle.nn.functional.flash_attention")
_BACKENDS = importlib.import_module("paddle.nn.attention.sdpa")
# The math backend of `scaled_dot_product_attention`, recorded like a kernel.
MATH = "math"


@contextmanager
def pretended_gpu(
    capability: tuple[int, int] = (8, 0),
    flash_version: int = 2,
    deterministic: bool = False,
    stand_in: str | None = "float32",
    kernels: Literal["gpu", "plain"] = "gpu",
) -> Iterator[list[KernelCall]]:
    """Take the kernels of a GPU in this block, backward passes included; calls are collected.

    Args:
        capability: (8, 0) is an A100, (9, 0) an H100.
        flash_version: FLAGS_flash_attn_version.
        deterministic: FLAGS_cudnn_deterministic.
        stand_in: dtype that stands for bfloat16 in attention: Paddle's CPU build cannot compute in
            it. None takes dtypes as they are, for traced programs.
        kernels: those of `paddle_vl.nn` to take.
    """
    flags = {
        "FLAGS_flash_attn_version": flash_version,
        "FLAGS_cudnn_deterministic": deterministic,
    }
    machine = Machine(capability, stand_in, flags)
    with pytest.MonkeyPatch.context() as patch:
        _pretend_place(patch, machine)
        for name, stub in STUBS.items():
            patch.setattr(_C_ops, name, partial(stub, machine))
        with use_kernels(kernels):
            yield machine.calls


def implementation(name: str) -> AbstractContextManager[Any]:
    """The kernels of `paddle_vl.nn` by name: `cpu`, `plain`, or those of a GPU, `a100` with
    FlashAttention 2 or `h100` with version 3."""
    if name == "a100":
        return pretended_gpu()
    if name == "h100":
        return pretended_gpu((9, 0), flash_version=3)
    return use_kernels(cast(Any, name))


def _pretend_place(patch: pytest.MonkeyPatch, machine: Machine) -> None:
    gpu = SimpleNamespace(
        is_gpu_place=lambda: True, is_custom_place=lambda: False, gpu_device_id=lambda: 0
    )
    own_params, own_math = _SDPA.SDPParams, _SDPA._math_attention

    def params(**values: Any) -> Any:
        dtypes = tuple(machine.meant(dtype) for dtype in values["dtype"])
        return own_params(**values | {"place": (gpu,) * 3, "dtype": dtypes})

    def math(q, *arguments: Any, **keywords: Any) -> Any:
        machine.record(MATH, q)
        return own_math(q, *arguments, **keywords)

    def get_flags(names: Any) -> dict[str, Any]:
        names = [names] if isinstance(names, str) else list(names)
        found = {name: machine.flags[name] for name in names if name in machine.flags}
        others = [name for name in names if name not in found]
        return found | (own_get_flags(others) if others else {})

    own_get_flags = paddle.get_flags
    patch.setattr(paddle, "get_flags", get_flags)
    patch.setattr(paddle.base.framework, "get_flags", get_flags)
    patch.setattr(_SDPA, "SDPParams", params)
    patch.setattr(_SDPA, "_math_attention", math)
    patch.setattr(_SDPA, "check_cuda_is_available", lambda: True)
    patch.setattr(_SDPA, "get_device_capability", lambda device: machine.capability)
    # Paddle remembers these answers.
    for name in ("check_sm_version", "check_mem_efficient_hardware_support", "use_tensor_cores"):
        patch.setattr(_SDPA, name, getattr(_SDPA, name).__wrapped__)
    patch.setattr(_SDPA, "minimum_gemm_alignment", _SDPA.minimum_gemm_alignment.__wrapped__)
    # It first looks for a custom device in a list that is empty in a build for CPUs.
    patch.setattr(
        _SDPA,
        "check_flash_attention_hardware_support",
        lambda device: _SDPA.check_sm_version((8, 0), (12, 1), device),
    )
    patch.setitem(_SDPA._config, "flash_attn", {
        "MINIMUM_SM_VERSION": (8, 0), "MAXIMUM_SM_VERSION": (12, 1), "support_dtypes": FLASH_DTYPES,
    })  # fmt: skip
    patch.setitem(_SDPA._config, "mem_efficient_attn", {
        "MINIMUM_SM_VERSION": (5, 0), "MAXIMUM_SM_VERSION": (12, 1),
        "support_dtypes": (*FLASH_DTYPES, paddle.float32),
    })  # fmt: skip
    for backend in list(_BACKENDS._backend_enabled):
        patch.setitem(_BACKENDS._backend_enabled, backend, True)
    # `flash_attention` asks for the device by name.
    proxy = SimpleNamespace(**vars(paddle) | {"get_device": lambda: "gpu:0"})
    patch.setattr(_FLASH, "paddle", proxy)
    patch.setattr(
        paddle_vl.nn.gpu, "has_flash_dtype", lambda x: machine.dtype_of(x) in FLASH_DTYPES
    )
