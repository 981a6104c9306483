"""Workarounds for Paddle, each with version, symptom and reason."""

import ctypes
import os
import platform
from pathlib import Path

import paddle

# glibc's mallopt parameters, from malloc.h.
_M_MXFAST, _M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = 1, -1, -2, -4
_CPU_INFO = Path("/proc/cpuinfo")


def configure_cpu_runtime(num_threads: int | None = None) -> bool:
    """Tune Paddle's CPU kernels, threads and memory; call once, before any matrix product.

    The settings apply to the process, so commands call this, never an import. Does nothing on a
    GPU. For paddlepaddle 3.3.1:

    - Its matrix library (Intel's, of 2019) runs its slowest code on AMD processors. An environment
      variable, read at the first product, chooses the right code: 4 times the speed.
    - It uses one thread unless OMP_NUM_THREADS is set before Paddle is imported, and then it warns.
      Its OpenMP library accepts the number at any time.
    - glibc returns every block above 32 MB to the system, and its pages fault again in the next
      operation: an element-wise add of 50 MB takes 12-16 ms, or 2 ms if blocks are kept.
    - Its matrix library keeps every buffer for packed blocks that it allocated, 47 MB in a training
      step of a small model. Without its pool they come from the blocks that are kept anyway.
    - With stride kernels a transpose is a view, which the next operation copies element by element.
      Without them the transpose kernel copies in blocks, about twenty times faster.

    Args:
        num_threads: threads of the CPU kernels; None leaves them as they are.

    Returns:
        Whether the settings were made (the device is a CPU).
    """
    if not paddle.get_device().startswith("cpu"):
        return False
    instructions = amd_instruction_set()
    if instructions is not None:
        os.environ.setdefault("MKL_DEBUG_CPU_TYPE", instructions)
    os.environ.setdefault("MKL_DISABLE_FAST_MM", "1")
    if num_threads is not None:
        openmp = Path(paddle.__file__).parent / "libs" / "libiomp5.so"
        ctypes.CDLL(str(openmp)).omp_set_num_threads(num_threads)
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        # Small freed blocks stay apart from their free neighbours otherwise.
        mallopt(_M_MXFAST, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 << 20)
    paddle.set_flags({"FLAGS_use_stride_kernel": False})
    return True


def amd_instruction_set(cpu_info: Path = _CPU_INFO) -> str | None:
    """The matrix library's setting for an AMD processor's widest instructions; None for others."""
    if not cpu_info.exists():
        return None
    text = cpu_info.read_text(encoding="utf-8", errors="replace")
    if "AuthenticAMD" not in text:
        return None
    avx512 = ("avx512f", "avx512dq", "avx512bw", "avx512vl")
    if all(f" {flag} " in text for flag in avx512):
        return "7"
    return "5" if " avx2 " in text else None
