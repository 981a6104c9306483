"""Writing an export: trace the programs, save each set of weights once, store an answer of each."""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn
from safetensors.numpy import save_file

import paddle_vl
from paddle_vl.checkpoint.manifest import FileSum, file_sum
from paddle_vl.export.folder import (
    CHECK_FILE,
    MANIFEST_FILE,
    ONNX_FOLDER,
    ONNX_WEIGHTS,
    ExportFolder,
    ExportManifest,
    ProgramEntry,
    as_tensor,
)

# By dtype, relative to the largest value: sums in another order.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
DTYPES = tuple(TOLERANCES)


@dataclass(frozen=True)
class ProgramToExport:
    """A program and an input for it.

    Attributes:
        layer: its forward is traced; it has `input_spec()`.
        weights: name of the file of its weights; programs of one name have the same weights.
        example: arrays by the names of the input specs.
        tracing: the context in which the forward is traced, to choose its operations.
    """

    layer: Any
    weights: str
    example: Mapping[str, np.ndarray]
    tracing: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class ModelToExport:
    """What a family gives for an export.

    Attributes:
        model_type: of its config.json.
        sizes: what the runtime must know of the configuration.
        programs: by name.
        save_files: writes configuration, tokenizer and processor files into a folder.
        onnx_programs: those that are written for ONNX, by name; their layers are others than those
            of `programs`, which are traced once. Programs in ONNX cannot write into their inputs.
        dtypes: of weights that its programs can have.
    """

    model_type: str
    sizes: Mapping[str, Any]
    programs: Mapping[str, ProgramToExport]
    save_files: Callable[[Path], None]
    onnx_programs: Mapping[str, ProgramToExport] = field(default_factory=dict)
    dtypes: Sequence[str] = ("float32",)


def export_model(
    model: ModelToExport, source: Path, out: Path, onnx: bool = False, dtype: str = "float32"
) -> ExportManifest:
    """Write the export; the folder gets its name when it is complete and has been run.

    Args:
        source: the checkpoint, named in the manifest with the checksums of its files.
        onnx: write the programs in ONNX, too.
        dtype: of weights and computation; the model's parameters are cast to it.

    Raises:
        ValueError: `out` exists and is not an empty folder; ONNX is asked for and the family has no
            programs for it; or the dtype cannot be exported on this machine.
        RuntimeError: the answer of a runtime differs from the model's, or paddle2onnx does not
            convert a program.
    """
    check_output(out)
    if onnx and not model.onnx_programs:
        raise ValueError(f"{model.model_type} has no programs for ONNX: export it without --onnx")
    check_dtype(dtype, onnx)
    if dtype not in model.dtypes:
        raise ValueError(
            f"{model.model_type} cannot be exported in {dtype}: its programs are in "
            f"{', '.join(model.dtypes)}"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial-", dir=out.parent))
    try:
        manifest = _write(model, source, partial, onnx, dtype)
        opened = ExportFolder.open(partial)
        for name in manifest.programs:
            opened.program(name)
        for name in manifest.onnx:
            replace(opened, runtime="onnxruntime").program(name)
        if out.exists():
            out.rmdir()
        os.replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return manifest


def check_output(out: Path) -> None:
    """
    Raises:
        ValueError: `out` exists and is not an empty folder.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: name a new one")


def check_dtype(dtype: str, onnx: bool = False, int8: bool = False) -> None:
    """Refuse a dtype of weights that cannot be exported here.

    Raises:
        ValueError: half precision on a CPU or in ONNX, int8 weights, or an unknown dtype.
    """
    if int8:
        raise ValueError(
            "--int8: programs with int8 weights are not there yet. Paddle computes with them in "
            "weight_only_linear, which has no CPU kernel: leave --int8 out, or on a GPU export in "
            "--dtype bfloat16"
        )
    if dtype not in DTYPES:
        raise ValueError(f"the dtype is {dtype!r}: use one of {', '.join(DTYPES)}")
    if dtype == "float32":
        return
    if not paddle.get_device().startswith("gpu"):
        raise ValueError(
            f"--dtype {dtype}: Paddle's CPU build has no half-precision kernels for linear layers "
            "and scatter, so that such programs can be neither traced nor run on this machine: "
            "export on a machine with a GPU and paddlepaddle-gpu, or in float32"
        )
    if onnx:
        raise ValueError(f"--onnx writes float32 programs: leave --dtype {dtype} out")


def _write(
    model: ModelToExport, source: Path, folder: Path, onnx: bool, dtype: str
) -> ExportManifest:
    if dtype != "float32":
        for program in model.programs.values():
            program.layer.to(dtype=dtype)
    entries, stored = {}, {}
    for name, program in model.programs.items():
        answer = _stored_answer(program, name)
        stored |= answer
        with program.tracing():
            save_program(program.layer, folder / name)
        weights = f"{program.weights}.pdiparams"
        _keep_once(folder / f"{name}.pdiparams", folder / weights)
        entries[name] = _entry(program, weights, len(answer))
    versions = {"paddle_vl": paddle_vl.__version__, "paddle": paddle.__version__}
    onnx_entries = {}
    if onnx:
        from paddle_vl.export.onnx_writing import package_versions, write_onnx

        versions |= package_versions()
        for name, program in model.onnx_programs.items():
            answer = _stored_answer(program, f"onnx.{name}")
            stored |= answer
            onnx_entries[name] = _entry(program, f"{ONNX_FOLDER}/{ONNX_WEIGHTS}", len(answer))
        write_onnx(model.onnx_programs, folder)
    save_file(
        {key: np.ascontiguousarray(array) for key, array in stored.items()}, folder / CHECK_FILE
    )
    model.save_files(folder)
    manifest = ExportManifest(
        model.model_type,
        model.sizes,
        dtype,
        {"folder": source.name, "files": _sums(source)},
        versions,
        TOLERANCES[dtype],
        entries,
        onnx_entries,
        {name: sum_ for name, sum_ in _file_sums(folder).items() if name != MANIFEST_FILE},
    )
    manifest.write(folder)
    return manifest


def _stored_answer(program: ProgramToExport, name: str) -> dict[str, np.ndarray]:
    """The example's inputs and the model's own outputs, under the names of `check.safetensors`."""
    program.layer.eval()
    with paddle.no_grad():
        outputs = _answer(program)
    stored = {f"{name}.input.{key}": array for key, array in program.example.items()}
    return stored | {
        f"{name}.output.{i}": output.astype("float32").numpy() for i, output in enumerate(outputs)
    }


def _entry(program: ProgramToExport, weights: str, num_stored: int) -> ProgramEntry:
    specs = _flat(program.layer.input_spec())
    inputs = {spec.name: (list(spec.shape), _name_of(spec.dtype)) for spec in specs}
    return ProgramEntry(weights, inputs, num_stored - len(program.example))


def save_program(layer: nn.Layer, path: Path) -> None:
    """Trace a layer and write PATH.json and PATH.pdiparams."""
    traced = paddle.jit.to_static(layer, full_graph=True, input_spec=layer.input_spec())
    paddle.jit.save(traced, str(path))


def _answer(program: ProgramToExport) -> list[Tensor]:
    """The model's own outputs for the example, in eager mode."""
    arguments = []
    for spec in program.layer.input_spec():
        tensors = [
            as_tensor(program.example[one.name], _name_of(one.dtype)) for one in _flat([spec])
        ]
        arguments.append(tensors if isinstance(spec, list) else tensors[0])
    outputs = program.layer(*arguments)
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def _flat(specs: list[Any]) -> list[Any]:
    return [one for spec in specs for one in (spec if isinstance(spec, list) else [spec])]


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("paddle.")


def _keep_once(written: Path, shared: Path) -> None:
    """Rename the weights of a program, or drop them where another has written the same."""
    if written == shared:
        return
    if not shared.exists():
        os.replace(written, shared)
        return
    if file_sum(written) != file_sum(shared):
        raise AssertionError(f"{written.name} has other weights than {shared.name}")
    written.unlink()


def _file_sums(folder: Path) -> dict[str, FileSum]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): file_sum(path) for path in files}


def _sums(source: Path) -> dict[str, str]:
    """Checksums of the weights and the configuration of a checkpoint."""
    names = ("*.safetensors", "config.json")
    files = sorted(path for name in names for path in source.glob(name))
    return {path.name: file_sum(path).checksum for path in files}
