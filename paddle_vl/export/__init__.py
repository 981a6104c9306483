"""Static programs of a model in a folder: written by `paddle-vl export`, run by `load`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddle_vl.export.folder import Runtime


def load(folder: str | Path, runtime: "Runtime" = "paddle") -> Any:
    """The exported model of a folder; no model code is imported.

    Args:
        runtime: `paddle` (`paddle.inference`), or `onnxruntime` for the programs in ONNX.

    Returns:
        An object of the family's exported class. For Qwen3-VL it has `generate`, `stream`, `answer`
        and `ask`.

    Raises:
        ValueError: the folder is no export, or of another version of the format, or has no
            programs for the runtime.
        RuntimeError: files are missing or damaged, or a program's answer to its stored input is
            not the stored one.
    """
    from paddle_vl.config.families import family_of
    from paddle_vl.export.folder import RUNTIMES, ExportFolder

    if runtime not in RUNTIMES:
        raise ValueError(f"the runtime is {runtime!r}: use one of {', '.join(RUNTIMES)}")
    opened = ExportFolder.open(Path(folder), runtime)
    entry = family_of({"model_type": opened.manifest.model_type})
    return entry.exported_class()(opened)
