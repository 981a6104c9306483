"""A setting of glibc's malloc that a process can only have from its start.

Paddle asks malloc for every tensor of a CPU, aligned to pages. malloc cuts an aligned block out of
a larger one and frees what is left before it. With its caches of small blocks, one per thread, a
rest of up to 1 KB becomes a small block and does not join its neighbours again: the next tensor of
the same size does not fit into the hole that the last one left. Without these caches a training
run needs a tenth less memory.

mallopt(3) does not know the setting, and malloc reads it before any code runs.
"""

import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata

VARIABLE = "GLIBC_TUNABLES"
_SETTING = "glibc.malloc.tcache_count"


def with_whole_blocks(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process whose malloc joins all free blocks; a value that the user has
    chosen stays, `GLIBC_TUNABLES=glibc.malloc.tcache_count=7` for glibc's own."""
    tunables = environment.get(VARIABLE, "")
    if _SETTING in tunables:
        return dict(environment)
    added = f"{tunables}:{_SETTING}=0" if tunables else f"{_SETTING}=0"
    return {**environment, VARIABLE: added}


def restart_with_whole_blocks() -> None:
    """Start this process again, under the same number, with `with_whole_blocks`.

    Returns if that would change nothing, on a GPU, without glibc, and in a debugger. Call it before
    anything else: it repeats what the interpreter did so far.
    """
    environment = with_whole_blocks(os.environ)
    if environment == dict(os.environ) or sys.gettrace() is not None or sys.flags.interactive:
        return
    if not sys.executable or platform.libc_ver()[0] != "glibc" or not _computes_on_cpu():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    except OSError:
        # The run needs more memory, and is the same.
        return


def _computes_on_cpu() -> bool:
    """Whether the wheel of Paddle is that without a GPU; Paddle itself is not imported."""
    try:
        metadata.version("paddlepaddle")
    except metadata.PackageNotFoundError:
        return False
    return True
