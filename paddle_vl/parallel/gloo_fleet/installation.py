"""Fills the gaps of Paddle's CPU build that fleet runs into, after checking what is there."""

import os

import paddle

from paddle_vl.parallel.gloo_fleet import (
    devices,
    point_to_point,
    process_group,
    rendezvous,
    tensor_parallel,
)
from paddle_vl.parallel.gloo_fleet.patch import Patch, check_version
from paddle_vl.parallel.gloo_fleet.time_limit import check_library

PATCHES: tuple[Patch, ...] = (
    *process_group.PATCHES,
    *point_to_point.PATCHES,
    *rendezvous.PATCHES,
    *tensor_parallel.PATCHES,
    *devices.PATCHES,
)
_installed = False


def install() -> bool:
    """Make fleet work on CPU processes that talk through gloo; nothing happens anywhere else.

    Call it before fleet.init and init_parallel_env; further calls change nothing. Every patch is
    checked before the first one is made. Groups of other backends than gloo keep Paddle's own
    functions.

    Returns:
        Whether Paddle runs here on CPUs with gloo, so that the patches are in place.

    Raises:
        RuntimeError: another version of Paddle than 3.3, or a symbol that is not as known.
    """
    global _installed
    if not runs_on_gloo():
        return False
    if not _installed:
        check_version()
        check_library()
        for patch in PATCHES:
            patch.check()
        for patch in PATCHES:
            patch.apply()
        _installed = True
    return True


def runs_on_gloo() -> bool:
    """Whether this build of Paddle has no accelerator and the launcher asked for no other backend.

    PADDLE_DISTRI_BACKEND is the variable by which Paddle's launcher chooses the backend.
    """
    has_accelerator = (
        paddle.is_compiled_with_cuda()
        or paddle.is_compiled_with_xpu()
        or bool(paddle.device.get_all_custom_device_type())
    )
    backend = os.environ.get("PADDLE_DISTRI_BACKEND", "auto")
    return not has_accelerator and backend in ("auto", "gloo")
