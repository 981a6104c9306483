"""Versions, flags and memory: what a reader of a report needs first."""

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
from paddle_vl.doctor.check import Check, Machine, Result, info, ok, wrong
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


def checks(machine: Machine) -> list[Check]:
    return [
        Check("environment.versions", "wheel, commit, CUDA, cuDNN, NCCL and driver", _versions),
        Check("environment.flags", "flags and variables that change numbers or speed", _flags),
        Check("environment.memory", "memory of host and devices, processors", _memory),
    ]


def _versions(machine: Machine) -> Result:
    found: dict[str, Any] = dict(versions())
    found["paddle"] = paddle.__version__
    found["paddle_commit"] = version.commit
    git = git_state(Path(__file__).parent, of=Path(__file__))
    if git is not None:
        found["paddle_vl_revision"] = git["revision"]
    cards = nvidia_cards()
    if machine.device == "gpu":
        found["nccl"] = version.nccl()
        found["compute_capability"] = ".".join(map(str, paddle.device.cuda.get_device_capability()))
    if cards:
        found["driver"] = cards[0]["driver"]
    problem = version_problem(_installed_wheels(), paddle.__version__, bool(cards), machine.device)
    if problem is not None:
        return wrong(*problem, **found)
    parts = [f"paddle {paddle.__version__} ({machine.device})"]
    for name in ("cuda", "cudnn", "nccl", "driver", "compute_capability"):
        if name in found:
            parts.append(f"{name.replace('_', ' ')} {found[name]}")
    return ok(", ".join([*parts, f"python {found['python']}"]), **found)


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


def _installed_wheels() -> list[str]:
    found = []
    for wheel in _WHEELS:
        try:
            metadata.version(wheel)
            found.append(wheel)
        except metadata.PackageNotFoundError:
            continue
    return found


def nvidia_cards() -> list[dict[str, str]]:
    """Name, driver and memory of each card that the driver lists; empty without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = "--query-gpu=name,driver_version,memory.total,memory.used"
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    keys = ("name", "driver", "memory", "used")
    rows = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
    return [dict(zip(keys, map(str.strip, row), strict=False)) for row in rows]


def _flags(machine: Machine) -> Result:
    allocator = configure_allocator()
    if machine.device == "cpu":
        configure_cpu_runtime()
    values = {**_flag_values(), **allocator_flags()}
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


def _flag_values() -> dict[str, Any]:
    found = {}
    for name in _FLAGS:
        try:
            found.update(paddle.get_flags(name))
        except ValueError:
            # A flag of GPU wheels only.
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


def _memory(machine: Machine) -> Result:
    total, of = available_memory()
    figures: dict[str, Any] = {
        "processor": processor_name(),
        "processors": len(os.sched_getaffinity(0)),
        "host_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB, 2),
        "host_available_gb": round(_available_bytes() / GB, 2),
        "shared_memory_gb": round(shutil.disk_usage("/dev/shm").total / GB, 2)
        if Path("/dev/shm").is_dir()
        else None,
        "usable_gb": round(total / GB, 2),
    }
    devices = []
    for number in range(machine.num_devices):
        properties = paddle.device.cuda.get_device_properties(number)
        devices.append(
            {
                "name": properties.name,
                "gb": round(properties.total_memory / GB, 2),
                "multiprocessors": properties.multi_processor_count,
            }
        )
    used = [card.get("used") for card in nvidia_cards()]
    figures |= {"devices": devices, "devices_used": used}
    names = ", ".join(f"{device['name']} {device['gb']} GB" for device in devices)
    return info(
        f"{figures['processors']} processors ({figures['processor']}), {of} with "
        f"{total / GB:.1f} GB, {figures['host_available_gb']:.1f} GB of host memory available"
        + (f"; {names}" if names else ""),
        **figures,
    )


def _available_bytes(file: Path = Path("/proc/meminfo")) -> int:
    for line in file.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
