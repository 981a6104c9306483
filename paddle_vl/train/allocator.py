"""Flags of Paddle's GPU allocator: virtual memory management for training where it is unset.

Blocks of different size that the allocator holds cannot be joined, so gathering and freeing units
(sharding stage 3) or batches of different lengths leave gaps between allocated and reserved memory.
With virtual memory management (VMM) free neighbours are joined, as with PyTorch's
`expandable_segments`. Source: Paddle pull request #36189; a device without VMM ignores the flag.
Flags must be set before anything is allocated. On a CPU they have no effect, and commands leave
them alone.
"""

import os
from collections.abc import Mapping
from typing import Any

import paddle

STRATEGY, VIRTUAL = "FLAGS_allocator_strategy", "FLAGS_use_virtual_memory_auto_growth"
# Allocators that a user can choose in place of the one that grows.
_OTHERS = (
    "FLAGS_use_auto_growth_v2", "FLAGS_use_cuda_malloc_async_allocator",
    "FLAGS_use_system_allocator", "FLAGS_use_cuda_managed_memory",
)  # fmt: skip


def configure_allocator(environment: Mapping[str, str] = os.environ) -> str:
    """Turn VMM on, unless the user has chosen otherwise; call before anything is allocated on a
    device.

    Args:
        environment: where a user sets flags; Paddle has read it when it was imported.

    Returns:
        A line that says the flags' values, and what the user chose.
    """
    flags = allocator_flags()
    chosen = [name for name in (STRATEGY, VIRTUAL) if name in environment]
    chosen += [name for name in _OTHERS if flags[name]]
    if flags[STRATEGY] == "auto_growth" and set(chosen) <= {STRATEGY}:
        paddle.set_flags({VIRTUAL: True})
    values = paddle.get_flags([STRATEGY, VIRTUAL])
    told = ", ".join(f"{name}={values[name]}" for name in (STRATEGY, VIRTUAL))
    return f"Paddle's allocator: {told}" + (f" (you set {', '.join(chosen)})" if chosen else "")


def allocator_flags() -> dict[str, Any]:
    """The current values of the flags that `configure_allocator` looks at."""
    return paddle.get_flags([STRATEGY, VIRTUAL, *_OTHERS])
