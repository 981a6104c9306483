"""Programs in ONNX, converted by paddle2onnx; all of them keep their weights in one file.

While a program is traced for ONNX, functions of Paddle that paddle2onnx cannot convert, or converts
into something else, are replaced by equal compositions. Other programs and the model itself are
not touched.

Weights do not pass through paddle2onnx, which writes an empty file for more than 2 GB of them: they
are inputs of the program that it converts, and get their values afterwards.

paddle2onnx aborts its process on an operator that it does not know, so it runs in a process of its
own.
"""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import paddle
import paddle.nn.functional as F
import xxhash
from paddle import Tensor

from paddle_vl.export.folder import ONNX_FOLDER, ONNX_WEIGHTS, program_file

PACKAGES = ("onnx", "onnxruntime", "paddle2onnx")
# The first with ScatterND's sum.
OPSET = 17
_CONVERT = """
import sys
import paddle2onnx
opset, *programs = sys.argv[1:]
for program in programs:
    paddle2onnx.export(
        program + ".json", program + ".no_weights", program + ".onnx", opset_version=int(opset),
        auto_upgrade_opset=False, optimize_tool="None",
    )
"""


def check_packages() -> None:
    """
    Raises:
        ValueError: a package that ONNX needs is not installed.
    """
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(f"ONNX needs {', '.join(missing)}: pip install 'paddle-vl[onnx]'")


def package_versions() -> dict[str, str]:
    """Of the packages that wrote and checked the programs."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def write_onnx(programs: Mapping[str, Any], folder: Path) -> None:
    """Write `onnx/NAME.onnx` of each program, and the file of their weights.

    Args:
        programs: see `writing.ProgramToExport`.

    Raises:
        RuntimeError: paddle2onnx does not convert a program; has its output.
    """
    (folder / ONNX_FOLDER).mkdir()
    weights = _Weights(folder / ONNX_FOLDER / ONNX_WEIGHTS)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        traced = {name: Path(work) / name for name in programs}
        with compositions():
            for name, program in programs.items():
                program.save(traced[name])
                traced[name].with_suffix(".pdiparams").unlink()
                _make_weights_inputs(traced[name].with_suffix(".json"))
        _convert(list(traced.values()))
        for name, program in programs.items():
            source = traced[name].with_suffix(".onnx")
            weights.write(source, program.parameters(), folder / program_file("onnx", name))


def _swiglu(x: Tensor, y: Tensor | None = None, name: str | None = None) -> Tensor:
    if y is None:
        x, y = paddle.chunk(x, 2, axis=-1)
    return F.silu(x) * y


def _index_add(x: Tensor, index: Tensor, axis: int, value: Tensor, name: Any = None) -> Tensor:
    if axis:
        raise ValueError(f"index_add along axis {axis} has no composition for ONNX: use axis 0")
    return paddle.scatter_nd_add(x, index.unsqueeze(-1), value)


def _searchsorted(
    sorted_sequence: Tensor,
    values: Tensor,
    out_int32: bool = False,
    right: bool = False,
    name: str | None = None,
) -> Tensor:
    if len(sorted_sequence.shape) != 1:
        raise ValueError("searchsorted has a composition for ONNX for a sequence of one dim only")
    wide = values.unsqueeze(-1)
    is_before = sorted_sequence <= wide if right else sorted_sequence < wide
    return is_before.astype("int32" if out_int32 else "int64").sum(axis=-1)


def _any(x: Tensor, axis: Any = None, keepdim: bool = False, name: str | None = None) -> Tensor:
    # paddle2onnx makes a maximum of it, which of no values is the lowest number: True.
    return x.astype("int32").sum(axis=axis, keepdim=keepdim) > 0


_gelu = F.gelu


def _tanh_gelu(x: Tensor, approximate: bool = False, name: str | None = None) -> Tensor:
    # paddle2onnx makes the form with erf of both.
    if not approximate:
        return _gelu(x)
    return 0.5 * x * (1.0 + paddle.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


_COMPOSITIONS: tuple[tuple[Any, str, Callable[..., Tensor]], ...] = (
    (F, "swiglu", _swiglu),
    (F, "gelu", _tanh_gelu),
    (paddle, "index_add", _index_add),
    (paddle, "searchsorted", _searchsorted),
    (paddle, "any", _any),
    (paddle.pir.Value, "any", _any),
)


@contextmanager
def compositions() -> Iterator[None]:
    """Programs traced in the block have compositions in place of what ONNX lacks."""
    kept = [(module, name, getattr(module, name)) for module, name, _ in _COMPOSITIONS]
    try:
        for module, name, function in _COMPOSITIONS:
            setattr(module, name, function)
        yield
    finally:
        for module, name, function in kept:
            setattr(module, name, function)


def _make_weights_inputs(program: Path) -> None:
    """Replace the weights of a saved program by inputs of their names."""
    values = json.loads(program.read_text(encoding="utf-8"))
    (block,) = values["program"]["regions"][0]["blocks"]
    for operator in block["ops"]:
        if operator["#"] != "p":
            continue
        output, name = operator["O"], operator["A"][3]
        dtype, shape = output["TT"]["D"][0]["#"], output["TT"]["D"][1]
        if dtype != "0.t_f32":
            raise RuntimeError(f"{program.name}: weight {name} is no float32 but {dtype}")
        attributes = {
            "name": {"#": "0.a_str", "D": name},
            "shape": {"#": "1.a_intarray", "D": shape},
            "dtype": {"#": "1.a_dtype", "D": "float32"},
            "place": {"#": "1.a_place", "D": [0, 0, ""]},
        }
        stop_gradient = {"#": "0.a_array", "D": [{"#": "0.a_bool", "D": True}]}
        operator.clear()
        operator |= {
            "#": "1.data",
            "A": [{"AT": value, "N": key} for key, value in attributes.items()],
            "I": [],
            "O": [output],
            "OA": [{"AT": stop_gradient, "N": "stop_gradient"}],
        }
    program.write_text(json.dumps(values), encoding="utf-8")


def _convert(programs: list[Path]) -> None:
    """Write the ONNX file of each saved program beside it."""
    command = [sys.executable, "-c", _CONVERT, str(OPSET), *map(str, programs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    files = [program.with_suffix(".onnx") for program in programs]
    # Of more than 2 GB beside its weights paddle2onnx writes an empty file.
    failed = [file.stem for file in files if not file.is_file() or not file.stat().st_size]
    if done.returncode or failed:
        raise RuntimeError(
            f"paddle2onnx failed on {', '.join(failed) or 'a program'} (exit code "
            f"{done.returncode}). If it does not know an operator, give that an equal composition "
            f"in paddle_vl/export/onnx_writing.py:\n{(done.stdout + done.stderr)[-2000:]}"
        )


class _Weights:
    """The file of all programs' weights; equal tensors are in it once."""

    def __init__(self, path: Path):
        self._path = path
        self._places: dict[tuple[int, str], int] = {}
        path.touch()

    def write(self, source: Path, parameters: list[Tensor], target: Path) -> None:
        """Write a program again; inputs that are weights get their values, in the file."""
        import onnx
        from onnx.external_data_helper import set_external_data

        model = onnx.load(str(source))
        values = {parameter.name: parameter for parameter in parameters}
        inputs = list(model.graph.input)
        del model.graph.input[:]
        model.graph.input.extend(one for one in inputs if one.name not in values)
        for name in [one.name for one in inputs if one.name in values]:
            array = values[name].numpy()
            tensor = onnx.TensorProto(
                name=name, data_type=onnx.TensorProto.FLOAT, dims=array.shape, raw_data=b"0"
            )
            place, size = self._place(array.tobytes())
            set_external_data(tensor, ONNX_WEIGHTS, offset=place, length=size)
            tensor.ClearField("raw_data")
            model.graph.initializer.append(tensor)
        onnx.save(model, str(target))

    def _place(self, data: bytes) -> tuple[int, int]:
        """Offset and size of a weight in the file, to which it is added if it is new."""
        key = (len(data), xxhash.xxh3_128_hexdigest(data))
        if key not in self._places:
            with self._path.open("ab") as stream:
                # onnxruntime maps the file, in pages.
                stream.write(bytes(-stream.tell() % 4096))
                self._places[key] = stream.tell()
                stream.write(data)
        return self._places[key], len(data)
