"""How much memory this process holds, for the metrics."""

import os
from pathlib import Path

import paddle

_PAGE = os.sysconf("SC_PAGE_SIZE")


def memory_in_use() -> int:
    """Bytes: the most that tensors took on the GPU so far; on a CPU the resident set now.

    Neither waits for the device.
    """
    if not paddle.get_device().startswith("cpu"):
        return int(paddle.device.cuda.max_memory_allocated())
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE
