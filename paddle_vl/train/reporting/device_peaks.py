"""Peak FLOP/s of devices, the denominator of MFU.

Dense matrix products of 16-bit floats with float32 accumulation. For float32 the peak of TF32 on
devices that have it, if it is turned on (`train.tf32`) and not off by NVIDIA_TF32_OVERRIDE=0.

Source: NVIDIA's data sheets of H200, H100 (its figures are those of H800), H20, A100 (A800), A30,
A10, A40, L40S, L40, L20, L4, V100, V100S, T4, RTX A6000 and HGX B200 / GB200 NVL72; appendices of
the architecture white papers of Ampere GA102 (RTX 3090), Ada (RTX 4090, RTX 6000 Ada) and RTX
Blackwell (RTX 5090). Figures with sparsity are halved.
"""

import logging
import os
import re
from typing import Any, NamedTuple

import paddle

logger = logging.getLogger(__name__)


class Peak(NamedTuple):
    """TFLOP/s by dtype; None where a device has no matrix units for the dtype."""

    bfloat16: float | None
    tf32: float | None
    float32: float


_HOPPER_SXM, _HOPPER_PCIE = Peak(989.5, 494.5, 67.0), Peak(756.5, 378.0, 51.0)
_HOPPER_NVL = Peak(835.5, 417.5, 60.0)
_A100 = Peak(312.0, 156.0, 19.5)
# An entry matches a device name that contains all of its words; the first match is taken, so longer
# entries come first.
_PEAKS: tuple[tuple[str, Peak], ...] = (
    ("GB200", Peak(2500.0, 1250.0, 80.0)),
    ("B200", Peak(2250.0, 1100.0, 75.0)),
    ("H200 NVL", _HOPPER_NVL),
    ("H200", _HOPPER_SXM),
    ("GH200", _HOPPER_SXM),
    ("H100 NVL", _HOPPER_NVL),
    ("H100 PCIe", _HOPPER_PCIE),
    ("H100", _HOPPER_SXM),
    ("H800 PCIe", _HOPPER_PCIE),
    ("H800", _HOPPER_SXM),
    ("H20", Peak(148.0, 74.0, 44.0)),
    ("A100", _A100),
    ("A800", _A100),
    ("A30", Peak(165.0, 82.0, 10.3)),
    ("A10", Peak(125.0, 62.5, 31.2)),
    ("A40", Peak(149.7, 74.8, 37.4)),
    ("RTX A6000", Peak(154.8, 77.4, 38.7)),
    ("RTX 6000 Ada", Peak(364.2, 182.1, 91.1)),
    ("L40S", Peak(362.05, 183.0, 91.6)),
    ("L40", Peak(181.05, 90.5, 90.5)),
    ("L20", Peak(119.5, 59.8, 59.8)),
    ("L4", Peak(121.0, 60.0, 30.3)),
    ("RTX 3090 Ti", Peak(80.0, 40.0, 40.0)),
    ("RTX 3090", Peak(71.0, 35.6, 35.6)),
    ("RTX 4090 D", Peak(147.1, 73.5, 73.5)),
    ("RTX 4090", Peak(165.2, 82.6, 82.6)),
    ("RTX 5090", Peak(209.5, 104.8, 104.8)),
    ("V100S", Peak(None, None, 16.4)),
    ("V100 PCIE", Peak(None, None, 14.0)),
    ("V100", Peak(None, None, 15.7)),
    ("T4", Peak(None, None, 8.1)),
)
# Words of a device name that mean another device, or a part of one.
_OTHERS = frozenset({"LAPTOP", "MOBILE", "MAX", "MIG", "D", "TI", "SUPER", "PRO"})


def known_peak(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device; None if unknown.

    Args:
        device_name: CUDA's name, for instance `NVIDIA A100-SXM4-80GB`.
        dtype: `bfloat16` or `float32`, the dtype of matrix products.
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    for model, peak in _PEAKS:
        named = set(model.upper().split())
        if named <= words:
            if words & _OTHERS - named:
                return None
            core: Any = paddle.base.core
            is_on = core.get_cublas_switch() and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"
            name = "tf32" if dtype == "float32" and peak.tf32 is not None and is_on else dtype
            tera = getattr(peak, name)
            return None if tera is None else tera * 1e12
    return None


def device_peak(dtype: str, setting: float | None = None) -> float | None:
    """Peak FLOP/s of this process's device; None if unknown, which is logged unless it is a CPU.

    Args:
        setting: logging.device_peak_tflops, which overrides the table.
    """
    if setting is not None:
        return setting * 1e12
    if not paddle.get_device().startswith("gpu"):
        return None
    name = paddle.device.cuda.get_device_name()
    peak = known_peak(name, dtype)
    if peak is None:
        logger.info(
            "the peak FLOP/s of %s in %s is not known, so no mfu is reported: set "
            "logging.device_peak_tflops",
            name,
            dtype,
        )
    return peak
