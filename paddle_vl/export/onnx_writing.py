"""Programs in ONNX, converted by paddle2onnx; all of them keep their weights in one file.

While a program is traced for ONNX, functions of Paddle that paddle2onnx cannot convert, or converts
into something else, are replaced by equal compositions. Other programs and the model itself are
not touched.

paddle2onnx aborts its process on an operator that it does not know, without naming it, so it runs
in a process of its own, and the operators are named from its list.
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

from paddle_vl.export.folder import ONNX_FOLDER, ONNX_WEIGHTS, onnx_file
from paddle_vl.export.writing import ProgramToExport, save_program

PACKAGES = ("onnx", "onnxruntime", "paddle2onnx")
# The first with ScatterND's sum.
OPSET = 17
# Smaller constants stay in the program, where shapes are read from them.
_SMALLEST_WEIGHT = 1024
# Names of paddle2onnx's list where they differ from those of a program's operators.
_NAMES = {
    "add": "elementwise_add", "subtract": "elementwise_sub", "multiply": "elementwise_mul",
    "divide": "elementwise_div", "floor_divide": "elementwise_floordiv",
    "maximum": "elementwise_max", "minimum": "elementwise_min", "remainder": "elementwise_mod",
    "matmul": "matmul_v2", "nonzero": "where_index", "arange": "range", "unsqueeze": "unsqueeze2",
    "argmax": "arg_max", "argmin": "arg_min", "max": "reduce_max", "min": "reduce_min",
    "mean": "reduce_mean", "prod": "reduce_prod", "any": "reduce_any", "all": "reduce_all",
    "expand": "expand_v2", "topk": "top_k_v2", "flatten": "flatten_contiguous_range",
    "assign_value_": "assign_value",
}  # fmt: skip
# Operators of a program that are no computation.
_FRAME = ("data", "fetch", "feed", "combine", "split", "parameter", "p", "shadow_output", "yield")
_CONVERT = """
import sys
import paddle2onnx
opset, *programs = sys.argv[1:]
for program in programs:
    paddle2onnx.export(
        program + ".json", program + ".pdiparams", program + ".onnx", opset_version=int(opset),
        auto_upgrade_opset=False, optimize_tool="None", external_file=program + ".onnx.data",
    )
"""
_LIST = """
import json
import paddle2onnx.paddle2onnx_cpp2py_export as converter
print(json.dumps(converter.get_all_supported_operators_pir()))
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


def write_onnx(programs: Mapping[str, ProgramToExport], folder: Path) -> None:
    """Write `onnx/NAME.onnx` of each program, and the file of their weights.

    Raises:
        RuntimeError: paddle2onnx does not convert a program; has the operators and their layers.
    """
    (folder / ONNX_FOLDER).mkdir()
    weights = _Weights(folder / ONNX_FOLDER / ONNX_WEIGHTS)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        traced = {name: Path(work) / name for name in programs}
        with compositions():
            for name, program in programs.items():
                save_program(program.layer, traced[name])
        _convert(list(traced.values()))
        for name, program in traced.items():
            weights.move_out(program.with_suffix(".onnx"), folder / onnx_file(name))


def _swiglu(x: Tensor, y: Tensor | None = None, name: str | None = None) -> Tensor:
    if y is None:
        x, y = paddle.chunk(x, 2, axis=-1)
    return F.silu(x) * y


def _index_add(x: Tensor, index: Tensor, axis: int, value: Tensor, name: Any = None) -> Tensor:
    if axis:
        raise ValueError(f"index_add along axis {axis} has no composition for ONNX: use axis 0")
    return paddle.scatter_nd_add(x, index.unsqueeze(-1), value)


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


def _convert(programs: list[Path]) -> None:
    """Write the ONNX file of each saved program beside it."""
    done = _python(_CONVERT, str(OPSET), *map(str, programs))
    failed = [program for program in programs if not program.with_suffix(".onnx").is_file()]
    if done.returncode == 0 and not failed:
        return
    listed = _python(_LIST)
    if listed.returncode == 0:
        known = set(json.loads(listed.stdout.splitlines()[-1]))
        texts = []
        for program in failed:
            unknown = missing_operators(program.with_suffix(".json"), known).items()
            texts += [f"{program.name}: {name} in {', '.join(where)}" for name, where in unknown]
        if texts:
            raise RuntimeError(
                f"paddle2onnx does not convert these operators: {'; '.join(texts)}. Give each an "
                "equal composition in paddle_vl/export/onnx_writing.py"
            )
    name = failed[0].name if failed else "a program"
    raise RuntimeError(
        f"paddle2onnx failed on {name} (exit code {done.returncode}), though it lists every "
        f"operator:\n{(done.stdout + done.stderr)[-2000:]}"
    )


def missing_operators(program: Path, known: set[str]) -> dict[str, list[str]]:
    """Operators of a program that a converter does not know, each with the layers it is in."""
    found: dict[str, list[str]] = {}

    def walk(value: Any) -> None:
        if isinstance(value, list):
            for one in value:
                walk(one)
        if not isinstance(value, dict):
            return
        for operator in value.get("ops", ()):
            name = operator["#"].rpartition(".")[2]
            if name not in _FRAME and not known & {name, _NAMES.get(name)}:
                where = _layer_of(operator)
                if where not in found.setdefault(name, []):
                    found[name].append(where)
        for one in value.values():
            walk(one)

    walk(json.loads(program.read_text(encoding="utf-8")))
    return found


def _layer_of(operator: dict[str, Any]) -> str:
    attributes = {one["N"]: one["AT"].get("D") for one in operator.get("A", []) if "N" in one}
    return (attributes.get("struct_name") or "").strip("/") or "the program itself"


def _python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )


class _Weights:
    """The file of all programs' weights; equal tensors are in it once."""

    def __init__(self, path: Path):
        self._path = path
        self._places: dict[tuple[int, str], int] = {}
        path.touch()

    def move_out(self, source: Path, target: Path) -> None:
        """Write a program again with its weights in the file."""
        import onnx
        from onnx.external_data_helper import set_external_data

        model = onnx.load(str(source))
        with self._path.open("ab") as stream:
            for tensor in self._tensors(model):
                data = tensor.raw_data
                place = self._places.get(key := (len(data), xxhash.xxh3_128_hexdigest(data)))
                if place is None:
                    # onnxruntime maps the file, in pages.
                    stream.write(bytes(-stream.tell() % 4096))
                    place = self._places[key] = stream.tell()
                    stream.write(data)
                set_external_data(tensor, ONNX_WEIGHTS, offset=place, length=len(data))
                tensor.ClearField("raw_data")
        onnx.save(model, str(target))

    @staticmethod
    def _tensors(model: Any) -> list[Any]:
        """Large tensors of a program: initializers and constants."""
        tensors = list(model.graph.initializer)
        for node in model.graph.node:
            if node.op_type == "Constant":
                tensors += [one.t for one in node.attribute if one.name == "value"]
        return [one for one in tensors if len(one.raw_data) >= _SMALLEST_WEIGHT]
