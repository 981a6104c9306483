"""Paddle's settings of a GPU for the whole process: attention version, TF32, repeatability.

- FlashAttention 3 on Hopper (compute capability 9.0), if the installed Paddle has its libraries and
  FLAGS_flash_attn_version is not set by the user. Elsewhere Paddle's default, version 2.
- Matrix products of float32 in full precision. Paddle's default is TF32, with 10 bits of mantissa;
  PyTorch's, and so that of the models' originals, is full precision.
- Repeatable runs: kernels without atomic additions. See docs/gpu.md.

Set before a kernel has run. On a CPU nothing is set: its kernels are repeatable and know no TF32.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import paddle

FLASH_VERSION = "FLAGS_flash_attn_version"
REPEATABLE = {"FLAGS_cudnn_deterministic": True, "FLAGS_embedding_deterministic": 1}
# cuBLAS gives the same bits on every run if its workspaces are of fixed size.
_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
_HOPPER = (9, 0)
_LIBRARIES = ("libflashattnv3.so", "libflashmaskv2.so")
_TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"


class Gpu(NamedTuple):
    """What the settings depend on.

    Attributes:
        capability: compute capability of the device.
        libraries: folder with the libraries of the installed Paddle.
    """

    capability: tuple[int, int]
    libraries: Path

    @classmethod
    def current(cls) -> "Gpu | None":
        """The current device; None if it is not a GPU."""
        if not paddle.get_device().startswith("gpu"):
            return None
        return cls(
            paddle.device.cuda.get_device_capability(), Path(paddle.__file__).parent / "libs"
        )

    @property
    def has_version_3(self) -> bool:
        """Whether it runs FlashAttention 3."""
        return self.capability == _HOPPER and all(
            (self.libraries / name).exists() for name in _LIBRARIES
        )


def configure_gpu(
    deterministic: bool = False,
    tf32: bool = False,
    environment: MutableMapping[str, str] = os.environ,
    gpu: Gpu | None = None,
) -> str | None:
    """Make the settings; call before a kernel has run.

    Args:
        deterministic: repeatable runs.
        tf32: matrix products of float32 in TF32.
        environment: where a user sets flags; Paddle has read it when it was imported.
        gpu: None for the current device.

    Returns:
        A line that says what is set; None on a CPU.

    Raises:
        ValueError: the user chose FlashAttention 3 for a GPU or a Paddle that does not have it, or
            TF32 both here and off in the environment.
    """
    gpu = gpu or Gpu.current()
    if gpu is None:
        return None
    if tf32 and environment.get(_TF32_OVERRIDE) == "0":
        raise ValueError(
            f"train.tf32 is true but {_TF32_OVERRIDE}=0 is in the environment, which turns TF32 "
            "off: remove one of them"
        )
    version = paddle.get_flags(FLASH_VERSION)[FLASH_VERSION]
    if FLASH_VERSION not in environment and gpu.has_version_3:
        version = 3
        paddle.set_flags({FLASH_VERSION: version})
    capability = ".".join(map(str, gpu.capability))
    if version == 3 and not gpu.has_version_3:
        raise ValueError(
            f"{FLASH_VERSION} is 3, but FlashAttention 3 needs compute capability 9.0 and the "
            f"libraries {' and '.join(_LIBRARIES)} of Paddle; this device has {capability}: set it "
            "to 2"
        )
    told = [f"FlashAttention {version}"]
    core: Any = paddle.base.core
    core.set_cublas_switch(tf32)
    core.set_cudnn_switch(tf32)
    told.append("float32 products in TF32" if tf32 else "float32 products in full precision")
    if deterministic:
        paddle.set_flags(REPEATABLE)
        environment.setdefault(*_WORKSPACE)
        told.append("repeatable kernels")
    return f"GPU of compute capability {capability}: {', '.join(told)}"
