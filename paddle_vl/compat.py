"""Workarounds for Paddle itself: the version, the symptom, and why each is here."""

import ctypes
import platform

import paddle

# glibc's mallopt parameters, from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def configure_cpu_runtime() -> bool:
    """Make Paddle's CPU kernels reuse memory and copy transposes eagerly; call once per process.

    Two process-wide settings, so a command makes them, never an import. On a GPU nothing happens.

    - glibc returns every block above 32 MB to the system and faults its pages in again on the
      next operation (paddlepaddle 3.3.1): an element-wise add of 50 MB takes 12-16 ms, 2 ms with
      the blocks kept.
    - With stride kernels a transpose is a view and the next operation copies it element by
      element; without them the transpose kernel copies in blocks, some twenty times faster.

    Returns:
        Whether the settings were made (the device is a CPU).
    """
    if not paddle.get_device().startswith("cpu"):
        return False
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 << 20)
    paddle.set_flags({"FLAGS_use_stride_kernel": False})
    return True
