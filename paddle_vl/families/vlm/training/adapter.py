"""Merging of an adapter into its base model, from files to files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.checkpoint.adapter_files import StoredAdapter, base_folder, folder_with
from paddle_vl.checkpoint.reading import checkpoint_tensors, chosen_dtype
from paddle_vl.checkpoint.safetensors_io import StoredTensor
from paddle_vl.checkpoint.writing import DEFAULT_SHARD_BYTES, write_tensors
from paddle_vl.config.families import FamilyEntry
from paddle_vl.families.vlm.inputs.processor import VLProcessor, generation_settings
from paddle_vl.families.vlm.modeling.config import HEAD_KEY

_HEAD = HEAD_KEY.removesuffix(".weight")


def merge_with_processor(family: FamilyEntry, folder: Path, out: Path, base: str | None) -> Path:
    """`merge_adapter` with the processor's files, which are read first."""
    model_class = family.model_class()
    processor = VLProcessor.from_pretrained(
        folder_with("tokenizer.json", folder, base), model_type=model_class.model_type
    )
    used = merge_adapter(model_class, folder, out, base)
    processor.save_pretrained(out)
    return used


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
    adapter = StoredAdapter.read(folder, getattr(names, "key_here", str))
    adapter.tensors.update(names.tensors_as_here(adapter.tensors, config))
    stored = names.tensors_as_here(checkpoint_tensors(base), config)
    config, embedding = config.tied_by(stored), config.embedding_key
    if config.tie_word_embeddings:
        stored = with_head(adapter, stored, embedding)
        config = config.with_tie(HEAD_KEY not in stored)
    tensors = adapter.merged(stored)
    if (folder_of := getattr(names, "folder_of", None)) is not None:
        config, tensors = folder_of(config, tensors)
    out.mkdir(parents=True, exist_ok=True)
    write_tensors(out, "model", tensors, DEFAULT_SHARD_BYTES)
    dtype = {"torch_dtype": chosen_dtype("auto", {embedding: stored[embedding]})}
    config.save_pretrained(out, **(dtype if "architectures" in config.to_dict() else {}))
    settings = generation_settings(folder, base)
    if settings is not None:
        settings.save_pretrained(out)
    return base


def with_head(
    adapter: StoredAdapter, stored: Mapping[str, StoredTensor], embedding_key: str
) -> dict[str, StoredTensor]:
    """The tensors of a tied base for an adapter: with a head of their own if it has one.

    PEFT gives an adapter that names the embedding or the head a copy of that one alone, and the
    tie is gone; with `ensure_weight_tying` it has both, equal, of which the embedding is kept.

    Raises:
        ValueError: an adapter that keeps ties has two different weights.
    """
    tied = {key: tensor for key, tensor in stored.items() if key != HEAD_KEY}
    named = {key for key in adapter.tensors if key.startswith(f"{_HEAD}.") or key == embedding_key}
    if not named:
        return tied
    if not adapter.keeps_ties:
        return {**tied, HEAD_KEY: tied[embedding_key]}
    head = adapter.tensors.pop(HEAD_KEY, None)
    embedding = adapter.tensors.get(embedding_key)
    if head and (embedding is None or not np.array_equal(head.read(), embedding.read())):
        raise ValueError(
            f"{adapter.folder} keeps ties (ensure_weight_tying), and its {HEAD_KEY} is not its "
            f"{embedding_key}: save it again with PEFT"
        )
    return tied
