"""What this machine has."""

from pathlib import Path

# Of version 2 and 1; a container sees its own.
_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def machine_memory() -> int:
    """Bytes of memory and swap that the processes of this machine or container may use."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if " kB" in line}
    swap = sizes.get("SwapTotal", 0)
    total = sizes["MemTotal"] + swap
    for file in map(Path, _CGROUP_LIMITS):
        if file.is_file() and (text := file.read_text(encoding="ascii").strip()).isdigit():
            total = min(total, int(text) + swap)
    return total
