"""Flags of Paddle's GPU allocator: defaults for training where they are unset.

Blocks of different size that the allocator holds cannot be joined, so gathering and freeing units
(sharding stage 3) or batches of different lengths leave gaps between allocated and reserved memory.
With virtual memory management (VMM) free neighbours are joined, as with PyTorch's
`expandable_segments`. Source: Paddle pull request #36189; a device without VMM ignores the flag.
Flags must be set before anything is allocated. On a CPU they have no effect, and commands leave
them alone.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import paddle

_STRATEGY, _VIRTUAL = "FLAGS_allocator_strategy", "FLAGS_use_virtual_memory_auto_growth"


class Flag(NamedTuple):
    """Our value of a flag, and Paddle's."""

    ours: Any
    paddles: Any


DEFAULTS = {_STRATEGY: Flag("auto_growth", "auto_growth"), _VIRTUAL: Flag(True, False)}
# Allocators that a user can choose in place of the one that grows.
_OTHERS = (
    "FLAGS_use_auto_growth_v2", "FLAGS_use_cuda_malloc_async_allocator",
    "FLAGS_use_system_allocator", "FLAGS_use_cuda_managed_memory",
)  # fmt: skip


def configure_allocator(environment: Mapping[str, str] = os.environ) -> str:
    """Set the unset flags; call before anything is allocated on a device.

    Args:
        environment: where a user sets flags; Paddle has read it when it was imported.

    Returns:
        A line that says every flag's value and who chose it.
    """
    chosen = [name for name in _OTHERS if paddle.get_flags(name)[name]]
    told = []
    for name, flag in DEFAULTS.items():
        found = paddle.get_flags(name)[name]
        if name in environment or found not in (flag.paddles, flag.ours):
            origin = "set in the environment" if name in environment else "set before"
            if name == _STRATEGY and found != flag.ours:
                chosen.append(f"{name}={found}")
        elif name == _VIRTUAL and chosen:
            origin = f"left alone beside {', '.join(chosen)}"
        else:
            paddle.set_flags({name: flag.ours})
            found, origin = flag.ours, "default here"
        value = str(found).lower() if isinstance(found, bool) else found
        told.append(f"{name}={value} ({origin})")
    return f"Paddle's allocator: {', '.join(told)}"


def allocator_flags() -> dict[str, Any]:
    """The current values of the flags that `configure_allocator` looks at."""
    return paddle.get_flags([*DEFAULTS, *_OTHERS])
