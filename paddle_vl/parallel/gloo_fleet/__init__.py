"""Patches that Paddle's CPU build needs for fleet over gloo; install() applies them."""

import os

import paddle

# The first two fill PATCHES.
from paddle_vl.parallel.gloo_fleet import fleet_functions, process_group  # noqa: F401
from paddle_vl.parallel.gloo_fleet.patch import PATCHES, check_version
from paddle_vl.parallel.store.rendezvous import meet

_installed = False


def install() -> bool:
    """Make fleet work on CPU ranks that communicate through gloo; elsewhere do nothing.

    Call it before fleet.init and init_parallel_env, for which the ranks meet here. Further calls
    change nothing.

    Returns:
        Whether Paddle runs here on CPUs with gloo, so that the patches are in place.

    Raises:
        RuntimeError: Paddle is not 3.3.
    """
    global _installed
    if not runs_on_gloo():
        return False
    if not _installed:
        check_version()
        for patch in PATCHES:
            patch.apply()
        _installed = True
    if int(os.environ.get("PADDLE_TRAINERS_NUM", "1")) > 1:
        meet()
    return True


def runs_on_gloo() -> bool:
    """Whether Paddle has no accelerator and PADDLE_DISTRI_BACKEND names no other backend."""
    has_accelerator = (
        paddle.is_compiled_with_cuda()
        or paddle.is_compiled_with_xpu()
        or bool(paddle.device.get_all_custom_device_type())
    )
    backend = os.environ.get("PADDLE_DISTRI_BACKEND", "auto")
    return not has_accelerator and backend in ("auto", "gloo")
