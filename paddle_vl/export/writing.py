"""Writing an export: trace the programs, save each set of weights once, store an answer of each.

Programs compute in float32, whatever their weights are stored in. With bfloat16 weights, families
that allow it also get programs that compute in bfloat16, for GPUs; both read the same weights.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import paddle
from paddle import nn
from safetensors.numpy import save_file

import paddle_vl
from paddle_vl.checkpoint.manifest import FileSum, file_sum
from paddle_vl.export.folder import (
    CHECK_FILE,
    GPU_FOLDER,
    MANIFEST_FILE,
    ONNX_FOLDER,
    ONNX_WEIGHTS,
    AnswerChange,
    ExportFolder,
    ExportManifest,
    ProgramEntry,
    as_tensor,
)
from paddle_vl.export.program import has_gpu
from paddle_vl.export.stored_weights import HALF, in_bfloat16, store_weights
from paddle_vl.export.tracing import tracing

# By dtype of the computation, relative to the largest value: sums in another order.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
DTYPES = tuple(TOLERANCES)
Device = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class ProgramToExport:
    """A program and an input for it.

    Attributes:
        layer: its forward is traced; it has `input_spec()`.
        weights: name of the file of its weights; programs of one name have the same weights.
        example: arrays by the names of the input specs.
        gives_logits: whether its first output is logits.
        measured_output: the output that tells how much rounded weights change the answer.
    """

    layer: Any
    weights: str
    example: Mapping[str, np.ndarray]
    gives_logits: bool = False
    measured_output: int = 0


def _as_they_are(device: Device) -> AbstractContextManager:
    return nullcontext()


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
        computes_in_half: whether its programs can be traced in bfloat16.
        traced: makes the context in which programs are traced for a device.
        differ_on_gpu: names of programs that are traced for GPUs on their own.
    """

    model_type: str
    sizes: dict[str, Any]
    programs: Mapping[str, ProgramToExport]
    save_files: Callable[[Path], None]
    onnx_programs: Mapping[str, ProgramToExport] = field(default_factory=dict)
    computes_in_half: bool = False
    traced: Callable[[Device], AbstractContextManager] = _as_they_are
    differ_on_gpu: Sequence[str] = ()


def export_model(
    model: ModelToExport,
    source: Path,
    out: Path,
    onnx: bool = False,
    dtype: str = "float32",
) -> ExportManifest:
    """Write the export; the folder gets its name when it is complete and has been run.

    Args:
        source: the checkpoint, named in the manifest with the checksums of its files.
        onnx: write the programs in ONNX, too.
        dtype: of the stored weights; the model's parameters are replaced by stored ones.

    Raises:
        ValueError: `out` exists and is not an empty folder; ONNX is asked for and the family has no
            programs for it; or see `check_dtype`, `store_weights`.
        RuntimeError: the answer of a runtime differs from the model's, or paddle2onnx does not
            convert a program.
    """
    check_output(out)
    if onnx and not model.onnx_programs:
        raise ValueError(f"{model.model_type} has no programs for ONNX: export it without --onnx")
    check_dtype(dtype, onnx)
    with new_folder(out) as partial:
        manifest = write_export(model, source, partial, onnx, dtype)
        opened = ExportFolder.open(partial)
        for name in manifest.programs:
            replace(opened, takes_gpu_programs=False).program(name)
            if manifest.gpu_was_run:
                opened.program(name)
        for name in manifest.onnx:
            replace(opened, runtime="onnxruntime").program(name)
    return manifest


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that gets the name `out` at the end of the block, or is removed by an error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial-", dir=out.parent))
    try:
        yield partial
        if out.exists():
            out.rmdir()
        os.replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_output(out: Path) -> None:
    """
    Raises:
        ValueError: `out` exists and is not an empty folder.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: name a new one")


def check_dtype(dtype: str, onnx: bool = False) -> None:
    """Refuse a dtype of weights that cannot be exported.

    Raises:
        ValueError: an unknown dtype, or half precision in ONNX.
    """
    if dtype not in DTYPES:
        raise ValueError(f"the dtype is {dtype!r}: use one of {', '.join(DTYPES)}")
    if onnx and dtype != "float32":
        raise ValueError(f"--onnx writes float32 programs: leave --dtype {dtype} out")


def write_export(
    model: ModelToExport,
    source: Path,
    folder: Path,
    onnx: bool = False,
    dtype: str = "float32",
) -> ExportManifest:
    """Write programs, weights, stored answers, other files and the manifest into a folder."""
    is_stored, changes = dtype != "float32", {}
    if is_stored:
        exact = {name: _stored_answer(one, name) for name, one in model.programs.items()}
        layers = [one.layer for one in model.programs.values()]
        store_weights(layers, dtype)
    entries, gpu_entries, stored = {}, {}, {}
    for name, program in model.programs.items():
        answer = _stored_answer(program, name)
        stored |= answer
        if is_stored:
            changes[name] = _change(program, name, exact[name], answer)
        with model.traced("cpu"):
            entries[name] = _save(program, folder, name, len(answer))
        in_half = dtype == HALF and model.computes_in_half
        if in_half or name in model.differ_on_gpu:
            (folder / GPU_FOLDER).mkdir(exist_ok=True)
            with in_bfloat16() if in_half else nullcontext(), model.traced("gpu"):
                gpu_entries[name] = _save(program, folder, name, len(answer), GPU_FOLDER)
    versions = {"paddle_vl": paddle_vl.__version__, "paddle": paddle.__version__}
    onnx_entries = {}
    if onnx:
        from paddle_vl.export.onnx_writing import package_versions, write_onnx

        versions |= package_versions()
        for name, program in model.onnx_programs.items():
            answer = _stored_answer(program, f"onnx.{name}")
            stored |= answer
            onnx_entries[name] = _entry(program, f"{ONNX_FOLDER}/{ONNX_WEIGHTS}", len(answer))
        layers = {name: program.layer for name, program in model.onnx_programs.items()}
        write_onnx(layers, folder, save_program)
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
        TOLERANCES["float32"],
        entries,
        onnx_entries,
        gpu_entries,
        TOLERANCES[dtype] if gpu_entries else 0.0,
        bool(gpu_entries) and has_gpu(),
        changes,
        files={name: sum_ for name, sum_ in file_sums(folder).items() if name != MANIFEST_FILE},
    )
    manifest.write(folder)
    return manifest


def _stored_answer(program: ProgramToExport, name: str) -> dict[str, np.ndarray]:
    """The example's inputs and the model's own outputs, under the names of `check.safetensors`."""
    stored = {f"{name}.input.{key}": array for key, array in program.example.items()}
    outputs = enumerate(_answer_of(program))
    return stored | {f"{name}.output.{i}": output for i, output in outputs}


def _change(
    program: ProgramToExport,
    name: str,
    exact: Mapping[str, np.ndarray],
    rounded: Mapping[str, np.ndarray],
) -> AnswerChange:
    """What rounded weights do to a program's answer."""
    key = f"{name}.output.{program.measured_output}"
    wanted, found = exact[key].astype(np.float64), rounded[key].astype(np.float64)
    difference = np.abs(found - wanted)
    equal = float((found.argmax(axis=-1) == wanted.argmax(axis=-1)).mean())
    return AnswerChange(
        float(difference.max()),
        float(difference.mean()),
        float(np.abs(wanted).max()),
        equal if program.gives_logits else None,
    )


def _save(
    program: ProgramToExport, folder: Path, name: str, num_stored: int, below: str = ""
) -> ProgramEntry:
    """Write a program into the folder, or one below it, and its weights if none has them yet."""
    path = folder / below / name
    save_program(program.layer, path)
    weights = f"{program.weights}.pdiparams"
    _keep_once(path.with_suffix(".pdiparams"), folder / weights)
    return _entry(program, weights, num_stored)


def _entry(program: ProgramToExport, weights: str, num_stored: int) -> ProgramEntry:
    specs = _flat(program.layer.input_spec())
    inputs: Any = {spec.name: (list(spec.shape), _name_of(spec.dtype)) for spec in specs}
    return ProgramEntry(weights, inputs, num_stored - len(program.example))


def save_program(layer: nn.Layer, path: Path) -> None:
    """Trace a layer and write PATH.json and PATH.pdiparams."""
    traced: Any = paddle.jit.to_static(layer, full_graph=True, input_spec=layer.input_spec())
    with tracing():
        paddle.jit.save(traced, str(path))
    # The layer is traced anew next time, in another dtype.
    traced.forward.rollback()


def _answer_of(program: ProgramToExport) -> list[np.ndarray]:
    """The model's own outputs for the example, in eager mode, as float32."""
    program.layer.eval()
    arguments = []
    for spec in program.layer.input_spec():
        tensors = [
            as_tensor(program.example[one.name], _name_of(one.dtype)) for one in _flat([spec])
        ]
        arguments.append(tensors if isinstance(spec, list) else tensors[0])
    with paddle.no_grad():
        outputs = program.layer(*arguments)
    outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    return [output.astype("float32").numpy() for output in outputs]


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
        raise AssertionError(f"{written} has other weights than {shared.name}")
    written.unlink()


def file_sums(folder: Path) -> dict[str, FileSum]:
    """Of all files in a folder and below it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): file_sum(path) for path in files}


def _sums(source: Path) -> dict[str, str]:
    """Checksums of the weights and the configuration of a checkpoint."""
    names = ("*.safetensors", "config.json")
    files = sorted(path for name in names for path in source.glob(name))
    return {path.name: file_sum(path).checksum for path in files}
