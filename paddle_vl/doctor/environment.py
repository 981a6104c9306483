"""What a reader of a report needs first: versions, flags, memory, and how products are rounded."""

import os
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import paddle
from paddle import version

from paddle_vl.compat import configure_cpu_runtime
from paddle_vl.doctor.check import Machine, Result, check, info, ok, wrong
from paddle_vl.nn.examples import Dtype
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
# Flags and variables that make runs wrong or slow: what they do, and what to do.
_SPOILING = {
    "FLAGS_gemm_use_half_precision_compute_type": (
        "products of half precision add up in half precision", "unset it; losses drift with it",
    ),
    "FLAGS_check_nan_inf": (
        "every operator waits for the device", "unset it, except to look for a fault",
    ),
    "FLAGS_benchmark": (
        "every operator waits for the device", "unset it, except to look for a fault",
    ),
    "CUDA_LAUNCH_BLOCKING": (
        "every kernel waits for the one before", "unset it, except to look for a fault",
    ),
}  # fmt: skip
# 1 + 2^-12 has 12 bits behind the point: float32 keeps them, TF32 (10 bits) rounds to 1.
_TF32_STEP, _TERMS = 2.0**-12, 1024


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
    if (driver := nvidia_driver()) is not None:
        found["driver"] = driver
    installed = {distribution.metadata["Name"] for distribution in metadata.distributions()}
    wheels = [wheel for wheel in _WHEELS if wheel in installed]
    if problem := version_problem(wheels, paddle.__version__, driver is not None, machine.device):
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


def nvidia_driver() -> str | None:
    """The version of the driver; None where it lists no card."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.check_output(
            command, text=True, timeout=_NVIDIA_SECONDS, stderr=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return text.split("\n")[0].strip() or None


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
    if problem := flag_problem({**variables, **values}):
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


def flag_problem(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """A flag or variable that makes runs wrong or slow, and what to do."""
    for name, (what, remedy) in _SPOILING.items():
        if values.get(name) not in (None, False, 0, "", "0"):
            return f"{name} is on: {what}", remedy
    return None


@check("environment.memory")
def check_memory(machine: Machine) -> Result:
    """Memory of host and devices, processors."""
    total, of = available_memory()
    kilobytes = {
        line.split(":")[0]: int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
    }
    found = map(paddle.device.cuda.get_device_properties, range(machine.num_devices))
    devices = [{"name": each.name, "gb": round(each.total_memory / GB, 2)} for each in found]
    figures: dict[str, Any] = {
        "processor": processor_name(),
        "processors": len(os.sched_getaffinity(0)),
        "host_gb": round(1024 * kilobytes["MemTotal"] / GB, 2),
        "host_available_gb": round(1024 * kilobytes["MemAvailable"] / GB, 2),
        "usable_gb": round(total / GB, 2),
        "devices": devices,
    }
    names = "".join(f"; {device['name']} {device['gb']} GB" for device in devices)
    return info(
        f"{figures['processors']} processors ({figures['processor']}), {of} with "
        f"{total / GB:.1f} GB, {figures['host_available_gb']:.1f} GB of host memory available"
        f"{names}",
        **figures,
    )


def _sum_of_products(dtype: Dtype, value: float) -> float:
    """An entry of a product of `_TERMS` terms that are this value."""
    left = paddle.full([64, _TERMS], value).astype(dtype)
    product = paddle.matmul(left, paddle.ones([_TERMS, 64]).astype(dtype))
    return float(product[0, 0].astype("float32"))


def uses_tf32() -> bool:
    """Whether this process's float32 products run in TF32."""
    return abs(_sum_of_products("float32", 1.0 + _TF32_STEP) / _TERMS - 1.0) < _TF32_STEP / 2


@check("environment.tf32")
def check_tf32(machine: Machine) -> Result:
    """Whether float32 products run in TF32."""
    found, is_rounded = _sum_of_products("float32", 1.0 + _TF32_STEP), uses_tf32()
    asked = os.environ.get("NVIDIA_TF32_OVERRIDE")
    figures = {"sum": found, "exact": _TERMS * (1 + _TF32_STEP), "NVIDIA_TF32_OVERRIDE": asked}
    if not is_rounded and abs(found / _TERMS - 1.0 - _TF32_STEP) > _TF32_STEP / 8:
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
    if not is_rounded:
        return info("float32 products keep 23 bits; TF32 is off", **figures)
    return info(
        "float32 products run in TF32 (10 bits): expect float32 results within 1e-3, and set "
        "NVIDIA_TF32_OVERRIDE=0 for exact ones",
        **figures,
    )


@check("environment.bfloat16", needs_bfloat16=True)
def check_bfloat16(machine: Machine) -> Result:
    """Products of bfloat16 add up in float32."""
    # 256 is the last whole number after which a sum of ones in bfloat16 stands still.
    found = _sum_of_products("bfloat16", 1.0)
    if found == _TERMS:
        return ok(f"{_TERMS} ones add up to {found:g}: sums are float32", sum=found)
    return wrong(
        f"{_TERMS} ones in bfloat16 add up to {found:g}: sums are too coarse",
        "unset FLAGS_gemm_use_half_precision_compute_type and whatever reduces sums in bfloat16",
        sum=found,
    )
