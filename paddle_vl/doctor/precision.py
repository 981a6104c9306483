"""Products that reveal how they were computed: TF32, and sums in bfloat16."""

import os

import paddle

from paddle_vl.doctor.check import BFLOAT16, Check, Dtype, Machine, Result, info, ok, wrong

# 1 + 2^-12 has 12 bits behind the point: float32 keeps them, TF32 (10 bits) rounds to 1.
_STEP = 2.0**-12
_TERMS = 1024


def checks(machine: Machine) -> list[Check]:
    return [
        Check("precision.tf32", "whether float32 products run in TF32", _tf32),
        Check("precision.bfloat16", "products of bfloat16 add up in float32", _bf16, (BFLOAT16,)),
    ]


def uses_tf32() -> bool:
    """Whether this process's float32 products run in TF32."""
    return abs(float(_product("float32", 1.0 + _STEP)) / _TERMS - 1.0) < _STEP / 2


def _tf32(machine: Machine) -> Result:
    found = float(_product("float32", 1.0 + _STEP))
    bits = found / _TERMS - 1.0
    is_rounded = abs(bits) < _STEP / 2
    asked = os.environ.get("NVIDIA_TF32_OVERRIDE")
    figures = {"sum": found, "exact": _TERMS * (1 + _STEP), "NVIDIA_TF32_OVERRIDE": asked}
    if not is_rounded and abs(bits - _STEP) > _STEP / 8:
        return wrong(
            f"a product of {_TERMS} terms 1 + 2^-12 is {found!r}, neither float32 nor TF32",
            "Paddle's matrix library or the device is faulty: run nothing here",
            **figures,
        )
    if is_rounded and (asked == "0" or machine.device == "cpu"):
        return wrong(
            "float32 products are rounded to TF32, although this is a CPU or "
            "NVIDIA_TF32_OVERRIDE=0",
            "set NVIDIA_TF32_OVERRIDE=0 before Paddle starts; report it if it is",
            **figures,
        )
    if is_rounded:
        return info(
            "float32 products run in TF32 (10 bits): expect float32 results within 1e-3, and set "
            "NVIDIA_TF32_OVERRIDE=0 for exact ones",
            **figures,
        )
    return info("float32 products keep 23 bits; TF32 is off", **figures)


def _bf16(machine: Machine) -> Result:
    # 256 is the last whole number after which a sum of ones in bfloat16 stands still.
    found = float(_product("bfloat16", 1.0).astype("float32"))
    figures = {"sum": found, "exact": float(_TERMS)}
    if found == _TERMS:
        return ok(f"{_TERMS} ones add up to {found:g}: sums are float32", **figures)
    return wrong(
        f"{_TERMS} ones in bfloat16 add up to {found:g}: sums are too coarse",
        "unset FLAGS_gemm_use_half_precision_compute_type and whatever reduces sums in bfloat16",
        **figures,
    )


def _product(dtype: Dtype, value: float) -> paddle.Tensor:
    """The first entry of a product with that value in every entry of one factor."""
    left = paddle.full([64, _TERMS], value).astype(dtype)
    return paddle.matmul(left, paddle.ones([_TERMS, 64]).astype(dtype))[0, 0]
