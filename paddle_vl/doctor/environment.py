"""What a reader of a report needs first: versions, flags, memory, and how products are rounded."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import paddle
from paddle import version

from paddle_vl.compat import configure_cpu_runtime
from paddle_vl.doctor.check import Machine, Result, check, info, ok, wrong
from paddle_vl.doctor.measuring import TERMS, TF32_STEP, sum_of_products
from paddle_vl.profile.memory import GB
from paddle_vl.train.allocator import allocator_flags, configure_allocator
from paddle_vl.train.memory_needed import available_memory
from paddle_vl.train.reporting.run_record import git_state, processor_name, versions

_NVIDIA_SECONDS = 20
_WHEELS = ("paddlepaddle", "paddlepaddle-gpu")
# Flags of Paddle that change numbers, speed or memory, and variables that do.
_FLAGS = (
    "FLAGS_use_stride_kernel", "FLAGS_flash_attn_version", "FLAGS_cudnn_deterministic",
    "FLAGS_embedding_deterministic", "FLAGS_gemm_use_half_precision_compute_type",
    "FLAGS_cublaslt_exhaustive_search_times", "FLAGS_use_autotune",
    "FLAGS_conv_workspace_size_limit",
    "FLAGS_check_nan_inf", "FLAGS_benchmark", "FLAGS_low_precision_op_list",
    "FLAGS_fraction_of_gpu_memory_to_use", "FLAGS_eager_delete_tensor_gb",
)  # fmt: skip
_VARIABLES = re.compile(
    r"(FLAGS|NCCL|CUDA|NVIDIA|GLOO|OMP|MKL|CUBLAS|UCX|PADDLE_VL|PADDLE_DISTRI)_\w+"
)
_SECRET = re.compile(r"(?i)token|secret|password|key")


@check("environment.versions")
def check_versions(machine: Machine) -> Result:
    """Wheel, commit, CUDA, cuDNN, NCCL and driver."""
    found: dict[str, Any] = versions() | {
        "paddle": paddle.__version__,
        "paddle_commit": version.commit,
    }
    if (git := git_state(Path(__file__).parent, of=Path(__file__))) is not None:
        found["paddle_vl_revision"] = git["revision"]
    if machine.device == "gpu":
        found["nccl"] = version.nccl()
        found["compute_capability"] = ".".join(map(str, paddle.device.cuda.get_device_capability()))
    if cards := nvidia_cards():
        found["driver"] = cards[0]["driver"]
    installed = {distribution.metadata["Name"] for distribution in metadata.distributions()}
    wheels = [wheel for wheel in _WHEELS if wheel in installed]
    problem = version_problem(wheels, paddle.__version__, bool(cards), machine.device)
    if problem is not None:
        return wrong(*problem, **found)
    names = ("cuda", "cudnn", "nccl", "driver", "compute_capability", "python")
    parts = [f"{name.replace('_', ' ')} {found[name]}" for name in names if name in found]
    return ok(", ".join([f"paddle {paddle.__version__} ({machine.device})", *parts]), **found)


def version_problem(
    wheels: list[str], found: str, has_card: bool, device: str
) -> tuple[str, str] | None:
    """What is wrong with the wheels, and what to do.

    Args:
        wheels: those installed, of paddlepaddle and paddlepaddle-gpu.
        found: the version of Paddle.
        has_card: whether the driver lists an NVIDIA card.
    """
    if len(wheels) > 1:
        return (
            f"{' and '.join(wheels)} are both installed and overwrite each other's files",
            f"pip uninstall -y {' '.join(wheels)}, then install the one for this machine",
        )
    if not found.startswith("3.3."):
        return (
            f"paddle is {found}; this package is for 3.3",
            "install paddlepaddle 3.3.1 or paddlepaddle-gpu 3.3.1",
        )
    if has_card and device == "cpu":
        return (
            "the driver lists an NVIDIA card, and Paddle computes on the CPU",
            "install paddlepaddle-gpu 3.3.1 for this machine's CUDA; with that wheel, check "
            "CUDA_VISIBLE_DEVICES and the driver's version",
        )
    return None


def nvidia_cards() -> list[dict[str, str]]:
    """Name, driver and memory of each card that the driver lists; empty without one."""
    query = "--query-gpu=name,driver_version,memory.total,memory.used"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    keys = ("name", "driver", "memory", "used")
    rows = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
    return [dict(zip(keys, map(str.strip, row), strict=False)) for row in rows]


@check("environment.flags")
def check_flags(machine: Machine) -> Result:
    """Flags and variables that change numbers or speed."""
    allocator = configure_allocator()
    if machine.device == "cpu":
        configure_cpu_runtime()
    values: dict[str, Any] = {**existing_flags(_FLAGS), **allocator_flags()}
    variables = {
        name: "(set)" if _SECRET.search(name) else value
        for name, value in sorted(os.environ.items())
        if _VARIABLES.fullmatch(name)
    }
    problem = flag_problem(values, variables)
    if problem is not None:
        return wrong(*problem, flags=values, variables=variables)
    set_here = ", ".join(f"{name}={value}" for name, value in variables.items()) or "none"
    return info(f"{allocator}; variables: {set_here}"[:400], flags=values, variables=variables)


def existing_flags(names: tuple[str, ...]) -> dict[str, Any]:
    """Values of those flags that this wheel has; a CPU's lacks some."""
    found = {}
    for name in names:
        try:
            found.update(paddle.get_flags(name))
        except ValueError:
            continue
    return found


def flag_problem(flags: Mapping[str, Any], variables: Mapping[str, str]) -> tuple[str, str] | None:
    """A flag that makes runs wrong or slow, and what to do."""
    if flags.get("FLAGS_gemm_use_half_precision_compute_type"):
        return (
            "FLAGS_gemm_use_half_precision_compute_type is on: products of half precision add up "
            "in half precision",
            "unset it; losses drift with it",
        )
    if flags.get("FLAGS_check_nan_inf") or flags.get("FLAGS_benchmark"):
        return (
            "FLAGS_check_nan_inf or FLAGS_benchmark is on: every operator waits for the device",
            "unset them, except to look for a fault",
        )
    if variables.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        return (
            "CUDA_LAUNCH_BLOCKING is set: every kernel waits for the one before",
            "unset it, except to look for a fault",
        )
    return None


@check("environment.memory")
def check_memory(machine: Machine) -> Result:
    """Memory of host and devices, processors."""
    total, of = available_memory()
    shared = Path("/dev/shm")
    available = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    devices = [
        {
            "name": properties.name,
            "gb": round(properties.total_memory / GB, 2),
            "multiprocessors": properties.multi_processor_count,
        }
        for properties in map(paddle.device.cuda.get_device_properties, range(machine.num_devices))
    ]
    figures: dict[str, Any] = {
        "processor": processor_name(),
        "processors": len(os.sched_getaffinity(0)),
        "host_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB, 2),
        "host_available_gb": round(1024 * int(available[1]) / GB, 2) if available else 0.0,
        "shared_memory_gb": round(shutil.disk_usage(shared).total / GB, 2)
        if shared.is_dir()
        else None,
        "usable_gb": round(total / GB, 2),
        "devices": devices,
        "devices_used": [card.get("used") for card in nvidia_cards()],
    }
    names = ", ".join(f"{device['name']} {device['gb']} GB" for device in devices)
    return info(
        f"{figures['processors']} processors ({figures['processor']}), {of} with "
        f"{total / GB:.1f} GB, {figures['host_available_gb']:.1f} GB of host memory available"
        + (f"; {names}" if names else ""),
        **figures,
    )


@check("precision.tf32")
def check_tf32(machine: Machine) -> Result:
    """Whether float32 products run in TF32."""
    found = sum_of_products("float32", 1.0 + TF32_STEP)
    bits = found / TERMS - 1.0
    is_rounded = abs(bits) < TF32_STEP / 2
    asked = os.environ.get("NVIDIA_TF32_OVERRIDE")
    figures = {"sum": found, "exact": TERMS * (1 + TF32_STEP), "NVIDIA_TF32_OVERRIDE": asked}
    if not is_rounded and abs(bits - TF32_STEP) > TF32_STEP / 8:
        return wrong(
            f"a product of {TERMS} terms 1 + 2^-12 is {found!r}, neither float32 nor TF32",
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
    text = "float32 products keep 23 bits; TF32 is off"
    if is_rounded:
        text = (
            "float32 products run in TF32 (10 bits): expect float32 results within 1e-3, and set "
            "NVIDIA_TF32_OVERRIDE=0 for exact ones"
        )
    return info(text, **figures)


@check("precision.bfloat16", need="bfloat16")
def check_bfloat16(machine: Machine) -> Result:
    """Products of bfloat16 add up in float32."""
    # 256 is the last whole number after which a sum of ones in bfloat16 stands still.
    found = sum_of_products("bfloat16", 1.0)
    figures = {"sum": found, "exact": float(TERMS)}
    if found == TERMS:
        return ok(f"{TERMS} ones add up to {found:g}: sums are float32", **figures)
    return wrong(
        f"{TERMS} ones in bfloat16 add up to {found:g}: sums are too coarse",
        "unset FLAGS_gemm_use_half_precision_compute_type and whatever reduces sums in bfloat16",
        **figures,
    )
