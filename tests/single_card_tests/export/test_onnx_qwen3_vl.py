"""Programs in ONNX. (That Qwen3-VL's answer as the model does: `test_exported_qwen3_vl.py`.)

Guarantees: compositions equal the functions that they replace and leave the model alone; weights
are stored once, apart from the programs, and may have more than 2 GB; a program that cannot be
converted is named; what is missing is refused with the remedy.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from paddle_vl.export import load, onnx_writing
from paddle_vl.export.folder import ExportFolder
from paddle_vl.export.onnx_writing import check_packages, compositions, write_onnx
from paddle_vl.export.program import OnnxProgram
from paddle_vl.export.qwen3_vl.programs import model_to_export
from paddle_vl.export.writing import ProgramToExport, export_model, spec
from tests.support.exports import needs_onnx


@needs_onnx
def test_weights_of_all_onnx_programs_are_stored_once(folder):
    import onnx

    places = {}
    for name in ("tower", "prefill", "decode"):
        program = onnx.load(str(folder / "onnx" / f"{name}.onnx"), load_external_data=False)
        tensors = [one for one in program.graph.initializer if one.external_data]
        places[name] = {one.external_data[1].value for one in tensors}
        assert {one.external_data[0].value for one in tensors} == {"weights.bin"}
    assert len(places["prefill"]) > 10
    assert places["prefill"] == places["decode"]
    assert not places["tower"] & places["decode"]


@needs_onnx
def test_damaged_onnx_weights_are_named(folder, tmp_path):
    whole = (folder / "onnx" / "weights.bin").read_bytes()
    try:
        (folder / "onnx" / "weights.bin").write_bytes(b"\xff" + whole[1:])
        with pytest.raises(RuntimeError, match=r"onnx/weights\.bin"):
            load(folder, "onnxruntime")
    finally:
        (folder / "onnx" / "weights.bin").write_bytes(whole)


@needs_onnx
def test_an_export_without_onnx_is_refused_by_onnxruntime(folder):
    opened = ExportFolder.open(folder, "onnxruntime")
    without = replace(opened, manifest=replace(opened.manifest, onnx={}))
    with pytest.raises(ValueError, match=r"no program tower for onnxruntime: .*--onnx"):
        without.program("tower")
    with pytest.raises(ValueError, match="runtime is 'tensorrt': use one of paddle, onnxruntime"):
        load(folder, "tensorrt")


class Special(nn.Layer):
    """Has an operator without a counterpart in ONNX."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.digamma(x)


def program_of(layer: nn.Layer, width: int) -> ProgramToExport:
    """A layer of rows as a program."""

    def run(layer: nn.Layer, given: dict) -> paddle.Tensor:
        return layer(given["x"])

    specs, example = [spec("x", [None, width], "float32")], np.zeros((1, width), np.float32)
    return ProgramToExport(layer, run, specs, "w", {"x": example})


@needs_onnx
def test_a_program_with_an_operator_that_onnx_lacks_is_named(tmp_path):
    layer = nn.Sequential(nn.Linear(2, 2), Special())
    with pytest.raises(RuntimeError, match=r"paddle2onnx failed on unknown .*equal composition"):
        write_onnx({"unknown": program_of(layer, 2)}, tmp_path)


class Wide(nn.Layer):
    """A weight of 256 KiB."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.linear(x)


class FarWeights(onnx_writing._Weights):
    """Weights behind a hole of 5 GiB, which takes no room on a disk."""

    def __init__(self, path: Path):
        super().__init__(path)
        os.truncate(path, 5 << 30)


@needs_onnx
def test_weights_may_have_more_bytes_than_a_program(tmp_path, monkeypatch):
    """Offsets may need more than 32 bits."""
    monkeypatch.setattr(onnx_writing, "_Weights", FarWeights)
    layer, x = Wide(), np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    write_onnx({"wide": program_of(layer, 256)}, tmp_path)
    assert (tmp_path / "onnx" / "wide.onnx").stat().st_size < 64 << 10
    assert (tmp_path / "onnx" / "weights.bin").stat().st_size > (5 << 30) + (256 << 10)
    program = OnnxProgram(tmp_path / "onnx" / "wide.onnx", {"x": ([-1, 256], "float32")})
    (found,) = program({"x": x})
    np.testing.assert_allclose(found.numpy(), layer(paddle.to_tensor(x)), rtol=1e-5, atol=1e-3)


def test_compositions_equal_what_they_replace():
    x, y = paddle.randn([5, 8]), paddle.randn([5, 8])
    rows = paddle.to_tensor([3, 0])
    ascending, values = paddle.to_tensor([0, 2, 2, 5]), paddle.to_tensor([[2, 9, -1], [5, 3, 0]])

    def results() -> list[np.ndarray]:
        found = [
            F.swiglu(x),
            F.swiglu(x, y),
            F.gelu(x),
            F.gelu(x, approximate=True),
            paddle.index_add(x, rows, 0, y[:2]),
            paddle.searchsorted(ascending, values),
            paddle.searchsorted(ascending, values, right=True),
            paddle.any(x > 1.0),
            paddle.any(x > 1.0, axis=1, keepdim=True),
            paddle.any(x[:0] > 1.0, axis=0),
        ]
        return [one.numpy() for one in found]

    wanted, function = results(), F.swiglu
    with compositions():
        assert F.swiglu is not function
        found = results()
        with pytest.raises(ValueError, match="axis 1 has no composition"):
            paddle.index_add(x, rows, 1, y[:, :2])
        with pytest.raises(ValueError, match="a sequence of one dim only"):
            paddle.searchsorted(x, values)
    assert F.swiglu is function
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_missing_packages_and_programs_are_refused(model, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_writing, "PACKAGES", ("onnx", "no_such_package"))
    with pytest.raises(ValueError, match=r"no_such_package: pip install 'paddle-vl\[onnx\]'"):
        check_packages()
    without = replace(model_to_export(model, lambda _: None), onnx_programs={})
    with pytest.raises(ValueError, match="qwen3_vl has no programs for ONNX"):
        export_model(without, Path("tiny"), tmp_path / "out", onnx=True)
    assert not list(tmp_path.iterdir())
