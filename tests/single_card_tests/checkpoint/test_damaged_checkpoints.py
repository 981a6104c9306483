"""Safetensors files and weights that are damaged, relabelled, or of another configuration."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paddle_vl import Qwen3VLForConditionalGeneration
from paddle_vl.checkpoint.safetensors_io import (
    TensorToWrite,
    encoded,
    read_checkpoint_headers,
    read_header,
    write_file,
)
from tests.support.tiny import tiny_model


def write(file: Path, header: object, data: bytes = b"\0" * 24) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def entry(shape=(2, 3), offsets=(0, 24), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HEADERS = [
    b"42",
    b"[" * 100_000,
    b"\xff\xfe{}",
    {"w": 3},
    {"w": {"dtype": "F32", "shape": [6]}},
    {"w": entry(dtype="F8_E4M3")},
    {"w": entry(dtype="F64")},
    {"w": entry(shape=(-2, -3))},
    {"w": entry(shape=(10**30,), offsets=(0, 4 * 10**30))},
    {"w": entry(offsets=(24, 0))},
    {"a": entry(), "b": entry()},
    {"w": entry(shape=(4,), offsets=(8, 24))},
    {"w": entry(shape=(4,), offsets=(0, 16))},
]


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_header_that_contradicts_itself_is_refused(tmp_path, header):
    file = write(tmp_path / "bad.safetensors", header)
    with pytest.raises(RuntimeError, match=r"(?s)bad\.safetensors.*again"):
        read_header(file)


@pytest.mark.parametrize(
    ("content", "error", "told"),
    [
        *((struct.pack("<Q", n) + b"{}", RuntimeError, "bad.safetensors is not a complete")
          for n in (0, 1000, 2**64 - 1)),
        (
            {"w": entry((24,), (0, 24), "F8_E4M3")}, ValueError,
            "w has dtype F8_E4M3.*load the model that they were made",
        ),
    ],
)  # fmt: skip
def test_a_short_file_and_quantized_weights_are_named(tmp_path, content, error, told):
    file = tmp_path / "bad.safetensors"
    file.write_bytes(content) if isinstance(content, bytes) else write(file, content)
    with pytest.raises(error, match=told):
        read_header(file)


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ([], r"holds \[\], not an object"),
        ({}, "weight_map is None"),
        ({"weight_map": {}}, r"weight_map is \{\}"),
        ({"weight_map": {"w": 3}}, "has 3 for w, which is no file of this folder"),
        ({"weight_map": {"w": ".."}}, "has '..' for w"),
        ({"weight_map": {"w": "../other/part.safetensors"}}, "no file of this folder"),
        ({"weight_map": {"w": "/etc/passwd"}}, "no file of this folder"),
        ({"weight_map": {"w": "a\0b"}}, "no file of this folder"),
        ({"weight_map": {"w": "none.safetensors"}}, "none.safetensors"),
        ({"weight_map": {"x": "part.safetensors"}}, r"shards do not hold: \['x'\]"),
        ({"weight_map": {"w": "part.safetensors"}}, r"its shards hold: \['v'\]"),
    ],
)  # fmt: skip
def test_index_that_is_none_or_points_elsewhere_is_refused(tmp_path, index, named):
    held = {"w": entry(shape=(3,), offsets=(0, 12)), "v": entry(shape=(3,), offsets=(12, 24))}
    write(tmp_path / "part.safetensors", held)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RuntimeError, match=named) as error:
        read_checkpoint_headers(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("index", ['{"weight_map": {"w": "gone.safetensors"}}', "{", None])
def test_the_single_file_is_read_whatever_an_index_says(tmp_path, index):
    """As transformers 5.24 does."""
    # Which may be a link.
    elsewhere = write(tmp_path / "blob", {"__metadata__": {"format": "pt"}, "w": entry()})
    (tmp_path / "model.safetensors").symlink_to(elsewhere)
    write(tmp_path / "part.safetensors", {"w": entry()})
    text = index or json.dumps({"weight_map": {"w": "part.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert read_checkpoint_headers(tmp_path)["w"].file.name == "model.safetensors"
    (tmp_path / "model.safetensors").unlink()
    if index is None:
        assert read_checkpoint_headers(tmp_path)["w"].read().shape == (2, 3)


@pytest.mark.parametrize("dtype", ["F32", "F64", "F16", "BF16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, dtype, value):
    array = np.ones((300, 300), np.float32)
    array[299, 298:] = value
    kinds = {"F32": np.float32, "F64": np.float64, "F16": np.float16}
    stored = array.astype(kinds[dtype]) if dtype in kinds else (array.view(np.uint32) >> 16)
    stored = stored.astype(np.uint16) if dtype == "BF16" else stored
    file = tmp_path / "a.safetensors"
    write_file(file, [TensorToWrite("layer.w", array.shape, dtype, lambda: stored)])
    tensor = read_header(file)["layer.w"]
    with pytest.raises(RuntimeError, match=r"a\.safetensors: layer\.w holds 2 values .* of 90000"):
        tensor.read()
    assert not np.isfinite(tensor.read(must_be_finite=False)).all()


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny_model().save_pretrained(tmp_path)
    return tmp_path


NORM = "model.language_model.norm.weight"


def change(folder: Path, name: str, array: np.ndarray | None) -> None:
    """Replace an array, or leave it out."""
    arrays = load_file(folder / "model.safetensors")
    arrays.pop(name)
    save_file(arrays | ({} if array is None else {name: array}), folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "array", "error", "told"),
    [
        (NORM, np.full(16, np.nan, np.float32), RuntimeError, f"{NORM} holds 16 values"),
        (NORM, np.ones(16, np.int32), ValueError, rf"1 not of floating point.*: {NORM} \(I32\)"),
        ("lm_head.weight", None, ValueError, "tie_word_embeddings is false; 1 missing: lm_head"),
    ],
)
def test_weights_that_do_not_fit_are_named(folder, name, array, error, told):
    change(folder, name, array)
    with pytest.raises(error, match=told):
        Qwen3VLForConditionalGeneration.from_pretrained(folder)


def test_head_of_its_own_where_the_configuration_ties_it_is_refused(folder):
    values = json.loads((folder / "config.json").read_text())
    values["tie_word_embeddings"] = values["text_config"]["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"config\.json: tie_word_embeddings is true, but"):
        Qwen3VLForConditionalGeneration.from_pretrained(folder)
    arrays = load_file(folder / "model.safetensors")
    change(folder, "lm_head.weight", arrays["model.language_model.embed_tokens.weight"])
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    assert model.config.tie_word_embeddings


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (2, 3)])
def test_tensor_of_any_shape_is_written(tmp_path, shape, dtype):
    file, values = tmp_path / "a.safetensors", np.full(shape, -1.5, np.float32)
    write_file(file, [TensorToWrite("x", shape, dtype, lambda: encoded(values, dtype))])
    read = read_header(file)["x"].read()
    assert read.shape == shape
    np.testing.assert_array_equal(read, values)
