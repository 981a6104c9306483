"""Merging of an adapter into its base model, from files to files."""

from pathlib import Path
from typing import Any

from paddle_vl.checkpoint.adapter_files import StoredAdapter, base_folder
from paddle_vl.checkpoint.reading import checkpoint_tensors, chosen_dtype
from paddle_vl.checkpoint.writing import DEFAULT_SHARD_BYTES, write_tensors
from paddle_vl.families.vlm.config import EMBEDDING_KEY, HEAD_KEY
from paddle_vl.families.vlm.inputs.processor import generation_settings


def merge_adapter(
    model_class: Any, folder: Path, out: Path, base: str | Path | None = None
) -> Path:
    """Write the base's weights with the adapter added, and its configuration, to a new folder.

    Tensors are read, merged and written one by one in the base's dtypes; no model is built.

    Args:
        model_class: of the family, see `AdaptableModel`.
        folder: adapter in PEFT's format.
        base: base model to use instead of the one that the adapter names.

    Returns:
        The folder of the base.

    Raises:
        ValueError: the adapter does not fit the base.
        RuntimeError: a folder or file is missing or damaged.
    """
    base = base_folder(folder, base)
    config, names = model_class.config_class.from_pretrained(base), model_class.checkpoint_map
    adapter = StoredAdapter.read(folder)
    adapter.tensors.update(names.tensors_as_here(adapter.tensors, config))
    stored = names.tensors_as_here(checkpoint_tensors(base), config)
    tensors = adapter.merged(stored)
    out.mkdir(parents=True, exist_ok=True)
    write_tensors(out, "model", tensors, DEFAULT_SHARD_BYTES)
    if not config.tie_flags_agree:
        config = config.with_tie(HEAD_KEY not in stored)
    dtype = {"torch_dtype": chosen_dtype("auto", {EMBEDDING_KEY: stored[EMBEDDING_KEY]})}
    config.save_pretrained(out, **(dtype if "architectures" in config.to_dict() else {}))
    settings = generation_settings(folder, base)
    if settings is not None:
        settings.save_pretrained(out)
    return base
