"""An adapter and its base as one model folder, without building either."""

import shutil
from pathlib import Path

from paddle_vl.checkpoint.adapter_files import StoredAdapter, base_folder
from paddle_vl.checkpoint.reading import checkpoint_tensors
from paddle_vl.checkpoint.writing import DEFAULT_SHARD_BYTES, write_tensors
from paddle_vl.families.qwen3_vl.checkpoint_map import with_experts_as_here
from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig
from paddle_vl.generation.config import FILE_NAME


def merge_adapter(folder: Path, out: Path, base: str | Path | None = None) -> Path:
    """Write the base's weights with the adapter added, and its configurations, into a new folder.

    Tensors are read, added to and written one by one, in the base's dtypes.

    Args:
        base: the model to use instead of the one that the adapter names.

    Returns:
        The base.

    Raises:
        ValueError: the adapter does not fit the base, or `out` holds something.
        RuntimeError: a folder or file is missing or damaged.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: merge into a folder of its own")
    base = base_folder(folder, base)
    config = Qwen3VLConfig.from_pretrained(base)
    adapter = StoredAdapter.read(folder)
    adapter.tensors.update(with_experts_as_here(adapter.tensors, config))
    tensors = adapter.merged(with_experts_as_here(checkpoint_tensors(base), config))
    out.mkdir(parents=True, exist_ok=True)
    write_tensors(out, "model", tensors, DEFAULT_SHARD_BYTES)
    for name in ("config.json", FILE_NAME):
        if (base / name).is_file():
            shutil.copyfile(base / name, out / name)
    return base
