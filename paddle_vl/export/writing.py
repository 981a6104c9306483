"""Writing an export: trace the programs, save each set of weights once, store an answer of each.

Programs compute in float32, whatever their weights are stored in. With bfloat16 weights, families
that allow it also get programs that compute in bfloat16, for GPUs; both read the same weights.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.static import InputSpec
from safetensors.numpy import save_file

import paddle_vl
from paddle_vl.checkpoint.manifest import file_sum
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
from paddle_vl.export.tracing import kernels_for_cpu, tracing

# By dtype of the computation, relative to the largest value: sums in another order.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
DTYPES = tuple(TOLERANCES)


class ProgramToExport(nn.Layer):
    """A program: a function of a layer and of tensors by name, and an input for it.

    Args:
        layer: of the model.
        run: takes the layer and the tensors; returns one or more tensors.
        specs: the specs of the inputs, of the layer; their dtypes may be those of its weights.
        weights: name of the file of its weights, those that it uses; programs of one name have the
            same weights.
        example: arrays by the names of the specs.
        gives_logits: whether its first output is logits.
        measured_output: the output that tells how much rounded weights change the answer.
    """

    def __init__(
        self,
        layer: Any,
        run: Callable[[Any, Mapping[str, Tensor]], Any],
        specs: Callable[[Any], list[InputSpec]],
        weights: str,
        example: Mapping[str, np.ndarray],
        gives_logits: bool = False,
        measured_output: int = 0,
    ):
        super().__init__()
        self.layer, self._run, self.weights, self.example = layer, run, weights, example
        self._specs = specs
        self.gives_logits, self.measured_output = gives_logits, measured_output

    @property
    def specs(self) -> dict[str, InputSpec]:
        """The specs of the inputs by name."""
        return {str(one.name): one for one in self._specs(self.layer)}

    def forward(self, given: Mapping[str, Tensor]) -> Any:
        return self._run(self.layer, given)

    def answer(self) -> list[np.ndarray]:
        """The model's own outputs for the example, in eager mode, as float32."""
        self.eval()
        given = {
            name: as_tensor(self.example[name], _name_of(one.dtype))
            for name, one in self.specs.items()
        }
        with paddle.no_grad():
            outputs = self(given)
        outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
        return [output.astype("float32").numpy() for output in outputs]

    def save(self, path: Path) -> None:
        """Trace it and write PATH.json and PATH.pdiparams."""
        specs: Any = [self.specs]
        traced: Any = paddle.jit.to_static(self, full_graph=True, input_spec=specs)
        with tracing():
            paddle.jit.save(traced, str(path))
        # It is traced anew next time, in another dtype or for ONNX.
        traced.forward.rollback()


def spec(name: str, shape: Sequence[int | None], dtype: Any) -> InputSpec:
    """An input of a program, without a gradient: a program keeps what a backward pass needs."""
    return InputSpec(shape, dtype, name, stop_gradient=True)


def cache_specs(num_layers: int, shape: Sequence[int | None], dtype: Any) -> list[InputSpec]:
    """Keys and values of each layer."""
    kinds = ("key", "value")
    return [spec(f"{kind}_{i}", shape, dtype) for i in range(num_layers) for kind in kinds]


@dataclass(frozen=True)
class ModelToExport:
    """What a family gives for an export.

    Attributes:
        model_type: of its config.json.
        sizes: what the runtime must know of the configuration.
        programs: by name.
        save_files: writes configuration, tokenizer and processor files into a folder.
        onnx_programs: those that are written for ONNX, by name. They cannot write into inputs.
        computes_in_half: whether its programs can be traced in bfloat16.
        takes_cpu_kernels: whether its programs for CPUs are traced in `kernels_for_cpu`.
    """

    model_type: str
    sizes: dict[str, Any]
    programs: Mapping[str, ProgramToExport]
    save_files: Callable[[Path], None]
    onnx_programs: Mapping[str, ProgramToExport] = field(default_factory=dict)
    computes_in_half: bool = False
    takes_cpu_kernels: bool = False


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
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial-", dir=out.parent))
    try:
        manifest = write_export(model, source, partial, onnx, dtype)
        opened = ExportFolder.open(partial)
        for name in manifest.programs:
            replace(opened, takes_gpu_programs=False).program(name)
            if manifest.gpu_was_run:
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
    exact: dict[str, list[np.ndarray]] = {}
    if dtype != "float32":
        exact = {name: program.answer() for name, program in model.programs.items()}
        store_weights(model.programs.values(), dtype)
    entries, gpu_entries, onnx_entries, changes = {}, {}, {}, {}
    stored: dict[str, np.ndarray] = {}

    def answer_of(program: ProgramToExport, name: str) -> list[np.ndarray]:
        """Its answer, which is stored with the example."""
        answer = program.answer()
        stored.update({f"{name}.input.{key}": array for key, array in program.example.items()})
        stored.update({f"{name}.output.{i}": output for i, output in enumerate(answer)})
        return answer

    for name, program in model.programs.items():
        answer, weights = answer_of(program, name), f"{program.weights}.pdiparams"
        if exact:
            changes[name] = _change(program, exact[name], answer)
        with kernels_for_cpu() if model.takes_cpu_kernels else nullcontext():
            _save(program, folder / name, folder / weights)
        entries[name] = _entry(program, weights, answer)
        if dtype == HALF and model.computes_in_half:
            (folder / GPU_FOLDER).mkdir(exist_ok=True)
            with in_bfloat16():
                _save(program, folder / GPU_FOLDER / name, folder / weights)
                gpu_entries[name] = _entry(program, weights, answer)
    versions = {"paddle_vl": paddle_vl.__version__, "paddle": paddle.__version__}
    if onnx:
        from paddle_vl.export.onnx_writing import package_versions, write_onnx

        versions |= package_versions()
        for name, program in model.onnx_programs.items():
            answer = answer_of(program, f"onnx.{name}")
            onnx_entries[name] = _entry(program, f"{ONNX_FOLDER}/{ONNX_WEIGHTS}", answer)
        write_onnx(model.onnx_programs, folder)
    save_file(
        {key: np.ascontiguousarray(array) for key, array in stored.items()}, folder / CHECK_FILE
    )
    model.save_files(folder)
    sources = sorted({*source.glob("*.safetensors"), *source.glob("config.json")})
    manifest = ExportManifest(
        model.model_type,
        model.sizes,
        dtype,
        {"folder": source.name, "files": {path.name: file_sum(path).checksum for path in sources}},
        versions,
        TOLERANCES["float32"],
        entries,
        onnx_entries,
        gpu_entries,
        TOLERANCES[dtype] if gpu_entries else 0.0,
        bool(gpu_entries) and has_gpu(),
        changes,
        files={
            path.relative_to(folder).as_posix(): file_sum(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path != folder / MANIFEST_FILE
        },
    )
    manifest.write(folder)
    return manifest


def _change(
    program: ProgramToExport, exact: list[np.ndarray], rounded: list[np.ndarray]
) -> AnswerChange:
    """What rounded weights do to a program's answer."""
    number = program.measured_output
    wanted, found = exact[number].astype(np.float64), rounded[number].astype(np.float64)
    difference = np.abs(found - wanted)
    equal = float((found.argmax(axis=-1) == wanted.argmax(axis=-1)).mean())
    return AnswerChange(
        float(difference.max()),
        float(difference.mean()),
        float(np.abs(wanted).max()),
        equal if program.gives_logits else None,
    )


def _entry(program: ProgramToExport, weights: str, answer: list[np.ndarray]) -> ProgramEntry:
    inputs: Any = {
        name: (list(one.shape), _name_of(one.dtype)) for name, one in program.specs.items()
    }
    return ProgramEntry(weights, inputs, len(answer))


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("paddle.")


def _save(program: ProgramToExport, path: Path, shared: Path) -> None:
    """Write a program, and its weights unless another has written the same ones."""
    program.save(path)
    written = path.with_suffix(".pdiparams")
    if written == shared:
        return
    if not shared.exists():
        os.replace(written, shared)
        return
    if file_sum(written) != file_sum(shared):
        raise AssertionError(f"{written} has other weights than {shared.name}")
    written.unlink()
