"""Depth maps of LeRobot 0.6: 12-bit codes in videos, and TIFF images in Parquet.

Differs: lerobot takes the exponential by torch in float32, which rounds 1 in 100 codes the other
way than here; millimetres, which are whole, are the same.
"""

from collections.abc import Mapping
from io import BytesIO
from typing import Any, Literal

import numpy as np
from PIL import Image

from paddle_vl.data.jsonl import BadSampleError

DepthUnit = Literal["mm", "m"]
VIDEO_FORM = "gray12le"
MM_PER_M = 1000.0
_MOST_CODE = 4095
# lerobot's defaults.
_RANGE = {"depth_min": 0.01, "depth_max": 10.0, "shift": 3.5, "use_log": True}


def of_codes(codes: np.ndarray, info: Mapping[str, Any], unit: DepthUnit) -> np.ndarray:
    """The depth of a video's codes, float32; values beyond `depth_max` were cut off when written.

    Args:
        codes: uint16, 0 to 4095.
        info: of the feature.
    """
    least, most, shift, use_log = (info.get(f"video.{name}", _RANGE[name]) for name in _RANGE)
    low, high = np.array([least, most]) + (shift if use_log else 0)
    if use_log:
        low, high = np.log(low), np.log(high)
    step, first = np.float32((high - low) / _MOST_CODE), np.float32(low)
    metres = codes.astype(np.float32) * step + first
    if use_log:
        metres = np.exp(metres.astype(np.float64)).astype(np.float32) - np.float32(shift)
    metres = np.clip(metres, np.float32(least), np.float32(most))
    return metres if unit == "m" else np.rint(metres * MM_PER_M)


def of_image(content: bytes, info: Mapping[str, Any], unit: DepthUnit) -> np.ndarray:
    """The depth of a TIFF file, float32 `[height, width]`.

    Raises:
        BadSampleError: it cannot be decoded.
    """
    try:
        with Image.open(BytesIO(content), formats=["TIFF", "PNG"]) as image:
            values = np.asarray(image).astype(np.float32)
    except (OSError, ValueError, SyntaxError) as error:
        raise BadSampleError("unreadable_image", f"the depth map cannot be decoded: {error}") from (
            error
        )
    return in_unit(values, info.get("depth_unit"), unit)


def in_unit(values: np.ndarray, stored: DepthUnit | None, unit: DepthUnit) -> np.ndarray:
    """Values that are stored in one unit in another, of the same dtype; as they are if nothing
    says how they are stored."""
    if stored in (None, unit):
        return values
    return values * MM_PER_M if stored == "m" else values / MM_PER_M
