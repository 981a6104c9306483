"""Checkpoint rules of Qwen4-Exp: those of `paddle_vl.families.vlm.folders.delta_map`, tables of
n-grams that are cut into parts, and the whole numbers of their hashes.

A table is one parameter here; in files it is `shard_0` to `shard_N`, rows above each other in the
order of these numbers, each read and written by itself.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from paddle_vl.checkpoint.ranges import rows_of
from paddle_vl.checkpoint.rules import LinearWeights, Rule, Same
from paddle_vl.checkpoint.safetensors_io import JoinedRows, TensorToWrite
from paddle_vl.families.qwen4_exp.config import Qwen4ExpConfig
from paddle_vl.families.vlm.folders.delta_map import (
    KEPT,
    PRECISE,
    delta_rules,
    with_stacked_experts,
)
from paddle_vl.files.text_file import shown
from paddle_vl.nn.ngram_embedding import NgramHash

__all__ = [
    "KEPT",
    "PRECISE",
    "checkpoint_rules",
    "constant_keys",
    "folder_of",
    "tensors_as_here",
    "with_constants",
]
_TABLE = "ngram_embedding.weight"
_PART = re.compile(r"ngram_embedding\.shard_(0|[1-9]\d{0,8})\.weight")
# By the names of `NgramHash`.
_CONSTANTS = {
    "multipliers": "layer_multipliers",
    "sizes": "ngram_heads_vocab_sizes",
    "offsets": "ngram_heads_offsets",
}
# In some files, of the last reader, which writes to no stream.
_UNUSED = "model.language_model.hyper_connection_mixer.block_inject_weight.weight"


def checkpoint_rules(config: Qwen4ExpConfig) -> tuple[Rule, ...]:
    """Rules from parameter names to HF keys and layouts, special cases first."""
    table, reader = "language_model.*.ngram_embedding.weight", "model.language_model"
    return delta_rules(
        config,
        (
            Rule(table, f"model.{table}", Same()),
            Rule("language_model.norm.*", f"{reader}.hyper_connection_mixer.*", LinearWeights()),
        ),
    )


def _prefix(layer: int) -> str:
    return f"model.language_model.layers.{layer}.ple.ple_embedding."


def tensors_as_here(stored: Mapping[str, Any], config: Qwen4ExpConfig) -> dict[str, Any]:
    """A checkpoint's tensors, with the experts of each layer stacked and the parts of each table
    joined.

    Raises:
        ValueError: a part of a table is missing, or of another size.
    """
    stored, text = with_stacked_experts(stored, config), config.text_config
    stored.pop(_UNUSED, None)
    for layer in text.ngram_layers:
        prefix = _prefix(layer)
        parts = {
            int(found[1]): key
            for key in stored
            if key.startswith(prefix) and (found := _PART.fullmatch(key.removeprefix(prefix)))
        }
        if parts:
            table = _joined({number: stored.pop(parts[number]) for number in sorted(parts)}, prefix)
            if prefix + _TABLE in stored:
                raise ValueError(f"{prefix}{_TABLE} is there beside its parts: keep the right ones")
            _check_size(table, text.num_ngram_rows(layer), text.ngram_width, prefix)
            stored[prefix + _TABLE] = table
    return stored


def _joined(parts: Mapping[int, Any], prefix: str) -> JoinedRows:
    if missing := [place for place, number in enumerate(parts) if place != number]:
        raise ValueError(
            f"{prefix}{_part(missing[0])} is missing, but the table has part {max(parts)}: fetch "
            "the model again"
        )
    if len(dtypes := sorted({part.dtype for part in parts.values()})) > 1:
        raise ValueError(f"{prefix}{_part('*')} have the dtypes {dtypes}: they must have one")
    return JoinedRows(tuple(parts.values()))


def _check_size(table: JoinedRows, rows: int, width: int, prefix: str) -> None:
    # All parts are as long as the first, but for the last.
    first, last = table.parts[0], len(table.parts) - 1
    odd = [
        f"{_part(number)} {list(part.shape)}"
        for number, part in enumerate(table.parts)
        if part.shape[1:] != (width,) or (number < last and part.shape != first.shape)
    ]
    found = sum(part.shape[0] for part in table.parts)
    if found != rows or any(part.shape[1:] != (width,) for part in table.parts):
        raise ValueError(
            f"{prefix}{_part(0)} to {_part(last)} have {found} rows, and the table of the model of "
            f"its config.json {rows}, of {width} numbers: a part is missing or of another size"
            + (f", perhaps {', '.join(odd)}" if odd else "")
        )


def constant_keys(config: Qwen4ExpConfig) -> list[str]:
    """The keys of whole numbers in a checkpoint."""
    layers = config.text_config.ngram_layers
    return [_prefix(layer) + key for layer in layers for key in _CONSTANTS.values()]


def with_constants(config: Qwen4ExpConfig, stored: dict[str, Any]) -> Qwen4ExpConfig:
    """The configuration with the constants of hashes in a checkpoint, which loses them; those of
    its own settings are used for others.

    Raises:
        ValueError: they are no hash of rows of the model's tables.
    """
    text, hashes = config.text_config, dict[int, NgramHash]()
    for layer in text.ngram_layers:
        keys = {name: _prefix(layer) + key for name, key in _CONSTANTS.items()}
        made = text.ngram_hash(layer)
        found = {name: stored.pop(key) for name, key in keys.items() if key in stored}
        for name, tensor in found.items():
            count = len(getattr(made, name))
            if tensor.dtype != "I64" or tensor.shape != (count,):
                raise ValueError(
                    f"{keys[name]} is {tensor.dtype} {list(tensor.shape)}; it must be I64 "
                    f"[{count}], exact whole numbers"
                )
        made = made._replace(**{name: tuple(t.read().tolist()) for name, t in found.items()})
        # Products of ids must not overflow.
        most = ((1 << 63) - 1) // max(text.vocab_size - 1, 1)
        rows = text.num_ngram_rows(layer)
        ends = [size + offset for size, offset in zip(made.sizes, made.offsets, strict=True)]
        for name, fits, needed in (
            ("multipliers", all(1 <= each <= most for each in made.multipliers), f"1 to {most}"),
            ("sizes", min(made.sizes) >= 1 and max(ends) <= rows, f"within the {rows} rows"),
            ("offsets", min(made.offsets) >= 0, "at least 0"),
        ):
            if not fits:
                raise ValueError(
                    f"{keys[name]} is {shown(list(getattr(made, name)))}; each must be {needed} "
                    "of the model of its config.json"
                )
        hashes[layer] = made
    return replace(config, text_config=replace(text, hashes=hashes))


def folder_of(
    config: Qwen4ExpConfig, tensors: Iterable[TensorToWrite], layout: str = "hub"
) -> tuple[Qwen4ExpConfig, list[TensorToWrite]]:
    """Configuration and tensors of a model folder, of those of a stage: tables in parts, with the
    constants of their hashes."""
    prefixes = {_prefix(layer): layer for layer in config.text_config.ngram_layers}
    written = list[TensorToWrite]()
    for tensor in tensors:
        prefix = tensor.name.removesuffix(_TABLE)
        # One without a source is a merged adapter's, beside the constants of its base.
        if prefix == tensor.name or prefix not in prefixes or tensor.source is None:
            written.append(tensor)
            continue
        length = -(-tensor.shape[0] // config.text_config.split_ngram_parts)
        starts = range(0, tensor.shape[0], length)
        written += [
            rows_of(tensor, prefix + _part(number), start, min(start + length, tensor.shape[0]))
            for number, start in enumerate(starts)
        ]
        made = config.text_config.ngram_hash(prefixes[prefix])
        for name, key in _CONSTANTS.items():
            values = np.array(getattr(made, name), np.int64)
            written.append(
                TensorToWrite(
                    prefix + key,
                    values.shape,
                    "I64",
                    partial(np.asarray, values),
                    is_joined=tensor.is_joined,
                )
            )
    return config, written


def _part(number: int | str) -> str:
    return f"ngram_embedding.shard_{number}.weight"
