"""Weights: safetensors files, shard indexes, adapters in PEFT's files."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fuzzing.mutations import as_json, damaged_bytes, damaged_text, json_bytes, mutated
from fuzzing.parser import Parser
from paddle_vl.models.checkpoint.adapter_files import StoredAdapter
from paddle_vl.models.checkpoint.safetensors_io import (
    TensorToWrite,
    read_checkpoint_headers,
    read_header,
    write_file,
)


def write_tensors(file: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F32") -> bytes:
    """A safetensors file of ones; its content."""
    numpy_dtype = {"F32": np.float32, "BF16": np.uint16, "I64": np.int64}[dtype]
    write_file(
        file,
        [
            TensorToWrite(name, shape, dtype, lambda s=shape: np.ones(s, numpy_dtype))
            for name, shape in shapes.items()
        ],
    )
    return file.read_bytes()


@st.composite
def tensor_files(draw, seeds: list[bytes]) -> bytes:
    """Files with other headers, before the right or another number of bytes."""
    seed = draw(st.sampled_from(seeds))
    (length,) = struct.unpack("<Q", seed[:8])
    header, data = json.loads(seed[8 : 8 + length]), seed[8 + length :]
    way = draw(st.sampled_from(["header", "header", "header", "values", "values", "text", "bytes"]))
    if way == "bytes":
        return draw(damaged_bytes([seed]))
    if way == "values":
        return seed[: 8 + length] + draw(damaged_bytes([data], 3))
    text = as_json(draw(mutated([header], 3)))
    if way == "text":
        text = draw(damaged_text(text))
    size = draw(st.sampled_from([len(text)] * 6 + [0, 1, len(text) + 1, 2**40, 2**63, 2**64 - 1]))
    return struct.pack("<Q", size) + text + data


def safetensors(folder: Path) -> Parser:
    """One file, all its tensors read."""
    file = folder / "model.safetensors"
    shapes = {"a.weight": (2, 3), "a.bias": (3,), "b": (), "none": (0, 4)}
    seeds = [write_tensors(file, shapes, dtype) for dtype in ("F32", "BF16", "I64")]

    def parse() -> None:
        for tensor in read_header(file).values():
            tensor.read()
            if len(tensor.shape) == 2:
                tensor.swapped().read()

    inputs = tensor_files(seeds).map(lambda content: {file.name: content})
    return Parser(inputs, parse, (file.name,))


def shard_index(folder: Path) -> Parser:
    """An index and two shards, all tensors read."""
    shards = {
        "model-00001-of-00002.safetensors": {"a": (2, 3), "b": (2,)},
        "model-00002-of-00002.safetensors": {"c": (4,)},
    }
    seeds = [write_tensors(folder / name, shapes) for name, shapes in shards.items()]
    weight_map = {key: name for name, shapes in shards.items() for key in shapes}
    index: dict[str, Any] = {"metadata": {"total_size": 48}, "weight_map": weight_map}
    file = folder / "model.safetensors.index.json"
    file.write_bytes(as_json(index))

    def parse() -> None:
        for tensor in read_checkpoint_headers(folder).values():
            tensor.read()

    indexes = json_bytes([index]).map(lambda content: {file.name: content})
    first = tensor_files(seeds[:1]).map(lambda content: {next(iter(shards)): content})
    return Parser(st.one_of(indexes, indexes, first), parse, (str(folder),))


_LORA: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "base", "r": 2,
    "lora_alpha": 4, "lora_dropout": 0.0, "use_rslora": False, "target_modules": ["q", "v"],
    "modules_to_save": None, "bias": "none", "fan_in_fan_out": False, "use_dora": False,
    "rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True, "inference_mode": True,
}  # fmt: skip


def adapter(folder: Path) -> Parser:
    """An adapter, added to its base."""
    inner = folder / "base"
    inner.mkdir()
    write_tensors(inner / "model.safetensors", {"q.weight": (4, 3), "v.weight": (5, 3), "n": (3,)})
    base = read_checkpoint_headers(inner)
    name = "base_model.model."
    shapes = {
        f"{name}q.lora_A.weight": (2, 3), f"{name}q.lora_B.weight": (4, 2),
        f"{name}v.lora_A.weight": (2, 3), f"{name}v.lora_B.weight": (5, 2),
    }  # fmt: skip
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    seed = write_tensors(file, shapes)
    config.write_bytes(as_json(_LORA))

    def parse() -> None:
        for tensor in StoredAdapter.read(folder).merged(base):
            tensor.produce()

    configs = json_bytes([_LORA, _LORA | {"use_rslora": True, "target_modules": "all-linear"}], 3)
    inputs = st.one_of(
        configs.map(lambda content: {config.name: content}),
        tensor_files([seed]).map(lambda content: {file.name: content}),
    )
    return Parser(inputs, parse, (file.name, config.name, str(folder)))
