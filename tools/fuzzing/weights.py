"""Weights: safetensors files, shard indexes, adapters in PEFT's format, exported folders."""

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import xxhash
from hypothesis import strategies as st
from paddle import nn

from fuzzing.mutations import as_json, damaged_bytes, in_file, json_bytes
from fuzzing.parser import Parser
from paddle_vl.checkpoint.adapter_files import StoredAdapter
from paddle_vl.checkpoint.manifest import FileSum, Manifest, Piece, check_weights
from paddle_vl.checkpoint.safetensors_io import (
    TensorToWrite,
    read_checkpoint_headers,
    read_header,
    write_file,
)
from paddle_vl.export.folder import CHECK_FILE, MANIFEST_FILE, ExportFolder
from paddle_vl.export.program import use_threads
from paddle_vl.export.qwen3_vl.exported import Sizes
from paddle_vl.export.writing import ModelToExport, ProgramToExport, spec, write_export


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

    inputs = in_file(file.name, tensor_files(seeds))
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

    indexes = in_file(file.name, json_bytes([index]))
    first = in_file(next(iter(shards)), tensor_files(seeds[:1]))
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
        in_file(config.name, configs),
        in_file(file.name, tensor_files([seed])),
    )
    return Parser(inputs, parse, (file.name, config.name, str(folder)))


def manifest(folder: Path) -> Parser:
    """A checkpoint's manifest.json and trainer_state.json, compared with its files."""
    from paddle_vl.train.checkpoint import load_state
    from paddle_vl.train.resume import examine

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
    content = (folder / "model.safetensors").read_bytes()
    sums["model.safetensors"] = FileSum.of(
        Piece(begin, len(part), xxhash.xxh3_128_hexdigest(part))
        for begin, part in ((0, content[:20]), (20, content[20:]))
    )
    Manifest(5, sums).write(folder)
    seed = json.loads((folder / "manifest.json").read_text())

    def parse() -> None:
        # Problems are in the returned verdict, not raised.
        examine(folder)
        load_state(folder)
        Manifest.read(folder)
        check_weights(folder)

    manifests = in_file("manifest.json", json_bytes([seed]))
    states = in_file("trainer_state.json", json_bytes([state]))
    return Parser(st.one_of(manifests, manifests, states), parse, (str(folder),))


def _rows(table: nn.Layer, given: Any) -> tuple[Any, Any]:
    """Rows of a table plus given ones: an input of whole numbers, and one of floats."""
    embedded = table(given["ids"]) + given["x"]
    return embedded, embedded.sum(axis=-1)


def exported_folder(folder: Path) -> Parser:
    """A folder with one small program; it is loaded, run and compared."""
    paddle.seed(0)
    example = {"ids": np.array([1, 4], np.int64), "x": np.ones([2, 3], np.float32)}
    sizes = {"image_token_id": 1, "video_token_id": 2, "vocab_size": 5, "table_side": 4, "merge": 2}
    specs = [spec("ids", [-1], "int64"), spec("x", [-1, 3], "float32")]
    program = ProgramToExport(nn.Embedding(5, 3), _rows, specs, "table", example)
    model = ModelToExport("qwen3_vl", sizes, {"rows": program}, lambda folder: None)
    write_export(model, folder, folder)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    stored = (folder / CHECK_FILE).read_bytes()
    use_threads(1)

    def parse() -> None:
        opened = ExportFolder.open(folder)
        opened.sizes(Sizes)
        for name in opened.manifest.programs:
            opened.program(name)

    def with_sum(content: bytes) -> dict[str, bytes]:
        """The check file, and a manifest that agrees with it."""
        sums = {"size": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
        files = manifest["files"] | {CHECK_FILE: sums}
        return {CHECK_FILE: content, MANIFEST_FILE: as_json(manifest | {"files": files})}

    # Entries of most kinds that an export may have.
    versions = manifest["versions"] | {"onnxruntime": "1"}
    seeds = [manifest, manifest | {"onnx": manifest["programs"], "versions": versions}]
    manifests = in_file(MANIFEST_FILE, json_bytes(seeds))
    stores = st.one_of(tensor_files([stored]), damaged_bytes([stored])).map(with_sum)
    return Parser(st.one_of(manifests, stores), parse, (str(folder),))
