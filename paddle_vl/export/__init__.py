"""Static programs of a model in a folder: written by `paddle-vl export`, run by `load`."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddle_vl.export.folder import Runtime

# Paddle sets the variable to 1, when it is imported, if it is unset. Ranks share the cores.
_takes_all_cores = (
    "OMP_NUM_THREADS" not in os.environ
    and "paddle" not in sys.modules
    and int(os.environ.get("PADDLE_TRAINERS_NUM", "1")) == 1
)


def load(folder: str | Path, runtime: "Runtime" = "paddle", num_threads: int | None = None) -> Any:
    """The exported model of a folder; no model code is imported.

    On a CPU the process gets the settings of `paddle_vl.compat.configure_cpu_runtime`, without
    which Paddle is slow on AMD processors; call this before other products of matrices.

    Args:
        runtime: `paddle` (`paddle.inference`), or `onnxruntime` for the programs in ONNX.
        num_threads: threads of the CPU kernels. None for the variable OMP_NUM_THREADS, or all cores
            if neither it is set nor Paddle imported before this package.

    Returns:
        An object of the family's exported class. For Qwen3-VL it has `generate`, `stream`, `answer`
        and `ask`.

    Raises:
        ValueError: the folder is no export, or of another version of the format, or has no
            programs for the runtime; or a wrong number of threads or of processes.
        RuntimeError: files are missing or damaged, or a program's answer to its stored input is
            not the stored one.
    """
    if num_threads is None and _takes_all_cores:
        num_threads = len(os.sched_getaffinity(0))

    from paddle_vl.config.families import family_of
    from paddle_vl.export.folder import RUNTIMES, ExportFolder
    from paddle_vl.export.program import use_threads

    if runtime not in RUNTIMES:
        raise ValueError(f"the runtime is {runtime!r}: use one of {', '.join(RUNTIMES)}")
    use_threads(num_threads)
    opened = ExportFolder.open(Path(folder), runtime)
    entry = family_of({"model_type": opened.manifest.model_type})
    return entry.capability("exported")(opened)
