"""Weights: safetensors files, shard indexes, adapters in PEFT's format."""

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from hypothesis import strategies as st

from fuzzing.mutations import as_json, damaged_bytes, json_bytes
from fuzzing.parser import Parser
from paddle_vl.checkpoint.adapter_files import StoredAdapter
from paddle_vl.checkpoint.manifest import FileSum, Manifest, check_weights
from paddle_vl.checkpoint.safetensors_io import (
    TensorToWrite,
    read_checkpoint_headers,
    read_header,
    write_file,
)


def write_tensors(file: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F32") -> bytes:
    """Write a safetensors file of ones; return its tensors."""
    numpy_dtype = {"F32": np.float32, "BF16": np.uint16, "I64": np.int64}[dtype]
    write_file(
        file,
        [
            TensorToWrite(name, shape, dtype, lambda s=shape: np.ones(s, numpy_dtype))
            for name, shape in shapes.items()
        ],
    )
    return file.read_bytes()


_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1, "X": 3}


@st.composite
def _sound_files(draw) -> bytes:
    """Valid files with random names, dtypes and shapes."""
    shapes = st.lists(st.integers(0, 5), max_size=3)
    names = st.one_of(st.text(max_size=8), st.sampled_from(["a.weight", "a.bias"]))
    entry = st.tuples(st.sampled_from(list(_WIDTHS)), shapes)
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape) in draw(st.dictionaries(names, entry, max_size=3)).items():
        end = offset + _WIDTHS[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text, pattern = as_json(header), draw(st.binary(min_size=1, max_size=8))
    return struct.pack("<Q", len(text)) + text + (pattern * offset)[:offset]


def tensor_files(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Files with changed headers, followed by the right or a wrong number of bytes."""
    parts = [(seed[8:], *struct.unpack("<Q", seed[:8])) for seed in seeds]
    headers, bodies = [rest[:length] for rest, length in parts], [r[n:] for r, n in parts]
    texts = json_bytes([json.loads(header) for header in headers])
    values, whole, sound = damaged_bytes(bodies, 3), damaged_bytes(seeds), _sound_files()
    sizes = st.sampled_from([None] * 30 + [0, 1, 2**40, 2**63, 2**64 - 1])
    ways = st.sampled_from(["header", "header", "values", "values", "sound", "bytes"])

    @st.composite
    def files(draw) -> bytes:
        way, which = draw(ways), draw(st.integers(0, len(seeds) - 1))
        if way in ("bytes", "sound"):
            return draw(whole if way == "bytes" else sound)
        text = headers[which] if way == "values" else draw(texts)
        data = draw(values) if way == "values" else bodies[which]
        size = draw(sizes)
        return struct.pack("<Q", len(text) if size is None else size) + text + data

    return files()


def safetensors(folder: Path) -> Parser:
    """One file; all tensors are read."""
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
    """An index and two shards; all tensors are read."""
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
    """An adapter, loaded onto its base model."""
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


def manifest(folder: Path) -> Parser:
    """A checkpoint's manifest.json and trainer_state.json, compared with its files."""
    from paddle_vl.train.checkpoint import load_state
    from paddle_vl.train.saving.verify import examine

    state = {"step": 5, "nonfinite_updates": 0, "has_manifest": True, "position": {"epoch": 0}}
    texts = {"config.yaml": b"{}", "config.json": b"{}", "trainer_state.json": as_json(state)}
    for name, content in texts.items():
        (folder / name).write_bytes(content)
    for name in ("model.safetensors", "optimizer.safetensors"):
        write_tensors(folder / name, {"a": (2,)})
    sums = {
        path.name: FileSum(path.stat().st_size, xxhash.xxh3_128(path.read_bytes()).hexdigest())
        for path in folder.iterdir()
    }
    Manifest(5, 0, sums).write(folder)
    seed = json.loads((folder / "manifest.json").read_text())

    def parse() -> None:
        # Problems are in the returned verdict, not raised.
        examine(folder)
        load_state(folder)
        Manifest.read(folder)
        check_weights(folder)

    manifests = json_bytes([seed]).map(lambda content: {"manifest.json": content})
    states = json_bytes([state]).map(lambda content: {"trainer_state.json": content})
    return Parser(st.one_of(manifests, manifests, states), parse, (str(folder),))
