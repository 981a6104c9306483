"""Writing an export: trace the programs, save each set of weights once, store an answer of each."""

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
    MANIFEST_FILE,
    ONNX_FOLDER,
    ONNX_WEIGHTS,
    ExportFolder,
    ExportManifest,
    ProgramEntry,
    as_tensor,
)
from paddle_vl.export.tracing import kernels_for_cpu, tracing


class ProgramToExport(nn.Layer):
    """A program: a function of a layer and of tensors by name, and an input for it.

    Args:
        layer: of the model.
        run: takes the layer and the tensors; returns one or more tensors.
        specs: of the inputs.
        weights: name of the file of its weights, those that it uses; programs of one name have the
            same weights.
        example: arrays by the names of the specs.
    """

    def __init__(
        self,
        layer: Any,
        run: Callable[[Any, Mapping[str, Tensor]], Any],
        specs: Sequence[InputSpec],
        weights: str,
        example: Mapping[str, np.ndarray],
    ):
        super().__init__()
        self.layer, self._run, self.weights, self.example = layer, run, weights, example
        self.specs = {str(one.name): one for one in specs}

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
        # It is traced anew for ONNX.
        traced.forward.rollback()


def spec(name: str, shape: Sequence[int | None], dtype: Any) -> InputSpec:
    """An input of a program, without a gradient: a program keeps what a backward pass needs."""
    return InputSpec(shape, dtype, name, stop_gradient=True)


def cache_specs(num_layers: int, shape: Sequence[int | None]) -> list[InputSpec]:
    """Keys and values of each layer, float32."""
    names = [f"{kind}_{i}" for i in range(num_layers) for kind in ("key", "value")]
    return [spec(name, shape, "float32") for name in names]


@dataclass(frozen=True)
class ModelToExport:
    """What a family gives for an export.

    Attributes:
        model_type: of its config.json.
        sizes: what the runtime must know of the configuration.
        programs: by name.
        save_files: writes configuration, tokenizer and processor files into a folder.
        onnx_programs: those that are written for ONNX, by name. They cannot write into inputs.
        takes_cpu_kernels: whether its programs for CPUs are traced in `kernels_for_cpu`.
    """

    model_type: str
    sizes: dict[str, Any]
    programs: Mapping[str, ProgramToExport]
    save_files: Callable[[Path], None]
    onnx_programs: Mapping[str, ProgramToExport] = field(default_factory=dict)
    takes_cpu_kernels: bool = False


def export_model(
    model: ModelToExport, source: Path, out: Path, onnx: bool = False
) -> ExportManifest:
    """Write the export; the folder gets its name when it is complete and has been run.

    Args:
        source: the checkpoint, named in the manifest with the checksums of its files.
        onnx: write the programs in ONNX, too.

    Raises:
        ValueError: `out` exists and is not an empty folder; or ONNX is asked for and the family has
            no programs for it.
        RuntimeError: the answer of a runtime differs from the model's, or paddle2onnx does not
            convert a program.
    """
    check_output(out)
    if onnx and not model.onnx_programs:
        raise ValueError(f"{model.model_type} has no programs for ONNX: export it without --onnx")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial-", dir=out.parent))
    try:
        manifest = write_export(model, source, partial, onnx)
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


def write_export(
    model: ModelToExport, source: Path, folder: Path, onnx: bool = False
) -> ExportManifest:
    """Write programs, weights, stored answers, other files and the manifest into a folder."""
    entries, onnx_entries = {}, {}
    stored: dict[str, np.ndarray] = {}

    def answer_of(program: ProgramToExport, name: str) -> list[np.ndarray]:
        """Its answer, which is stored with the example."""
        answer = program.answer()
        stored.update({f"{name}.input.{key}": array for key, array in program.example.items()})
        stored.update({f"{name}.output.{i}": output for i, output in enumerate(answer)})
        return answer

    for name, program in model.programs.items():
        answer, weights = answer_of(program, name), f"{program.weights}.pdiparams"
        with kernels_for_cpu() if model.takes_cpu_kernels else nullcontext():
            _save(program, folder / name, folder / weights)
        entries[name] = _entry(program, weights, answer)
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
        {"folder": source.name, "files": {path.name: file_sum(path).checksum for path in sources}},
        versions,
        entries,
        onnx_entries,
        files={
            path.relative_to(folder).as_posix(): file_sum(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path != folder / MANIFEST_FILE
        },
    )
    manifest.write(folder)
    return manifest


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
