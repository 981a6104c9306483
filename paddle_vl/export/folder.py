"""An export's folder: programs, their weights, a stored answer of each, and the manifest.

export.json            what is in the folder, see `ExportManifest`
NAME.json              a program in Paddle's format
gpu/NAME.json          the same in bfloat16, if the weights are; for GPUs
WEIGHTS.pdiparams      weights, once for all programs that have the same ones
onnx/NAME.onnx         a program in ONNX, if asked for; its weights are in onnx/weights.bin
check.safetensors      for each program inputs and outputs of the model itself
config.json, ...       the model's configuration, tokenizer and processor files
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import paddle
from paddle import Tensor
from safetensors.numpy import load_file

from paddle_vl.checkpoint.manifest import (
    damaged_files,
    files_as_json,
    files_from_json,
)
from paddle_vl.export.onnx_program import OnnxProgram
from paddle_vl.export.program import Program, has_gpu
from paddle_vl.files.text_file import read_json_object

MANIFEST_FILE = "export.json"
CHECK_FILE = "check.safetensors"
GPU_FOLDER = "gpu"
ONNX_FOLDER = "onnx"
ONNX_WEIGHTS = "weights.bin"
FORMAT = 1
REMEDY = "export the checkpoint again (paddle-vl export)"
Runtime = Literal["paddle", "onnxruntime"]
RUNTIMES = get_args(Runtime)
AnyProgram = Program | OnnxProgram


def gpu_file(name: str) -> str:
    """Path of a program for GPUs in an export's folder."""
    return f"{GPU_FOLDER}/{name}.json"


def rank_folder(folder: Path, rank: int) -> Path:
    """Folder of a rank's programs in an export of several."""
    return folder / f"rank_{rank}"


def onnx_file(name: str) -> str:
    """Path of an ONNX program in an export's folder."""
    return f"{ONNX_FOLDER}/{name}.onnx"


def as_tensor(array: np.ndarray, dtype: str) -> Tensor:
    """A copy of an array as an input of that dtype; half precision is stored as float32."""
    tensor: Any = paddle.to_tensor(array.copy())
    return tensor.astype(dtype)


@dataclass(frozen=True)
class ProgramEntry:
    """A program of the folder.

    Attributes:
        weights: file of its weights.
        inputs: shape and dtype by name, in order; -1 for a size that is free.
        num_outputs: number of output tensors.
    """

    weights: str
    inputs: Mapping[str, tuple[list[int], str]]
    num_outputs: int


@dataclass(frozen=True)
class AnswerChange:
    """Difference of a program's first floating-point output from that of float32 weights.

    On the stored input. For logits `equal_argmax` is the share of rows with the same argmax, None
    for other outputs.
    """

    largest: float
    mean: float
    largest_value: float
    equal_argmax: float | None = None


@dataclass(frozen=True)
class ExportManifest:
    """Content of `export.json`.

    Attributes:
        model_type: of the model, by which its family is found.
        sizes: what the runtime must know of the model's configuration.
        dtype: of the weights that are no int8.
        int8: whether linears, experts and vocabulary tables have int8 weights.
        source: the exported checkpoint: its folder's name, and the checksums of its files.
        versions: of paddle_vl and paddle.
        tolerance: greatest difference of the stored answers, relative to their largest value.
        programs: by name.
        onnx: programs in ONNX by name; none unless they were asked for.
        gpu: programs that compute in `dtype`, for GPUs; the others compute in float32.
        gpu_tolerance: as `tolerance`, of these.
        gpu_was_run: whether these were run when they were written; traced only without a GPU.
        change: by program, how the stored weights change its answer, see `AnswerChange`.
        mp_degree: number of tensor-parallel ranks; each has programs in `rank_R`.
        sequence_parallel: whether the prefill's rows are split, so that `mp_degree` must divide
            the tokens of its batch.
        rank: of the rank whose programs these are; None for those that all ranks share.
        files: size and checksum of every other file; of a rank's only the manifest.
    """

    model_type: str
    sizes: Mapping[str, Any]
    dtype: str
    source: Mapping[str, Any]
    versions: Mapping[str, str]
    tolerance: float
    programs: Mapping[str, ProgramEntry]
    onnx: Mapping[str, ProgramEntry] = field(default_factory=dict)
    int8: bool = False
    gpu: Mapping[str, ProgramEntry] = field(default_factory=dict)
    gpu_tolerance: float = 0.0
    gpu_was_run: bool = False
    change: Mapping[str, AnswerChange] = field(default_factory=dict)
    mp_degree: int = 1
    sequence_parallel: bool = False
    rank: int | None = None
    files: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the file."""
        values = asdict(self) | {"format": FORMAT, "files": files_as_json(self.files)}
        text = json.dumps(values, indent=1)
        (folder / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "ExportManifest":
        """
        Raises:
            ValueError: no export, or of another format or an unknown family.
            RuntimeError: damaged.
        """
        if not (folder / MANIFEST_FILE).is_file():
            raise ValueError(f"{folder} has no {MANIFEST_FILE}: give a folder of paddle-vl export")
        values = read_json_object(folder / MANIFEST_FILE, "an export's manifest", REMEDY)
        if values.pop("format", None) != FORMAT:
            raise ValueError(f"{folder / MANIFEST_FILE} is not of format {FORMAT}: {REMEDY}")
        try:
            values["files"] = files_from_json(values["files"])
            for kind in ("programs", "onnx", "gpu"):
                values[kind] = {
                    name: ProgramEntry(**entry) for name, entry in values.get(kind, {}).items()
                }
            changes = values.get("change", {}).items()
            values["change"] = {name: AnswerChange(**change) for name, change in changes}
            found = cls(**values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RuntimeError(
                f"{folder / MANIFEST_FILE} is damaged ({error}): {REMEDY}"
            ) from error
        return found


@dataclass(frozen=True)
class ExportFolder:
    """A folder whose files are complete and undamaged.

    Attributes:
        runtime: what runs its programs.
        takes_gpu_programs: whether a GPU runs the programs for GPUs.
        own: of this rank, in an export of several.
    """

    path: Path
    manifest: ExportManifest
    runtime: Runtime = "paddle"
    takes_gpu_programs: bool = True
    own: "ExportFolder | None" = None

    @classmethod
    def open(cls, path: Path, runtime: Runtime = "paddle") -> "ExportFolder":
        """Check every file's size and checksum; collective in an export of ranks.

        Raises:
            ValueError, RuntimeError: see `ExportManifest.read`; a file is missing or damaged; an
                export of ranks is opened by another number of processes, or for onnxruntime.
        """
        manifest = ExportManifest.read(path)
        cls._check_files(path, manifest)
        if manifest.mp_degree == 1 or manifest.rank is not None:
            return cls(path, manifest, runtime)
        from paddle_vl.export.ranks import connect, own_rank

        if runtime != "paddle":
            raise ValueError(
                f"{path} is an export of ranks, which have no programs for {runtime}: load it "
                "without a runtime"
            )
        rank = own_rank(path, manifest.mp_degree)
        own = cls.open(rank_folder(path, rank))
        connect(rank, manifest.mp_degree)
        return cls(path, manifest, own=own)

    @staticmethod
    def _check_files(path: Path, manifest: ExportManifest) -> None:
        if damaged := list(damaged_files(path, manifest.files)):
            raise RuntimeError(f"{path} is damaged: {'; '.join(damaged)}. {REMEDY}")

    def program(self, name: str) -> AnyProgram:
        """A program, ready to run, after its answer to the stored input was found right.

        Raises:
            ValueError: the folder has no program of this name for the runtime.
            RuntimeError: the answer is wrong, as an optimization pass of the runtime can make it.
        """
        if self.own is not None and name in self.own.manifest.programs:
            return self.own.program(name)
        is_onnx = self.runtime == "onnxruntime"
        manifest, tolerance = self.manifest, self.manifest.tolerance
        entries, file = manifest.programs, f"{name}.json"
        if is_onnx:
            entries, file = manifest.onnx, onnx_file(name)
        elif name in manifest.gpu and self.takes_gpu_programs and has_gpu():
            entries, file, tolerance = manifest.gpu, gpu_file(name), manifest.gpu_tolerance
        if name not in entries:
            raise ValueError(
                f"{self.path} has no program {name} for {self.runtime}: export the checkpoint "
                f"again (paddle-vl export{' --onnx' if is_onnx else ''})"
            )
        entry = entries[name]
        if is_onnx:
            program: AnyProgram = OnnxProgram(self.path / file, entry.inputs)
        else:
            program = Program(self.path / file, self.path / entry.weights, entry.inputs)
        self._check_answer(program, entry, f"onnx.{name}" if is_onnx else name, tolerance)
        return program

    def _check_answer(
        self, program: AnyProgram, entry: ProgramEntry, name: str, tolerance: float
    ) -> None:
        stored = load_file(self.path / CHECK_FILE)
        inputs = {
            key: as_tensor(stored[f"{name}.input.{key}"], dtype)
            for key, (_, dtype) in entry.inputs.items()
        }
        found = program(inputs)
        runtime, version = self.runtime, self.manifest.versions[self.runtime]
        for i, output in enumerate(found):
            wanted = stored[f"{name}.output.{i}"].astype(np.float64)
            array = output.astype("float32").numpy().astype(np.float64)
            if array.shape != wanted.shape:
                raise RuntimeError(
                    f"{self.path}: output {i} of {name} is of shape {list(array.shape)}, stored "
                    f"{list(wanted.shape)}: {REMEDY}"
                )
            error = np.abs(array - wanted).max(initial=0.0)
            limit = tolerance * max(np.abs(wanted).max(initial=0.0), 1.0)
            if not error <= limit:
                raise RuntimeError(
                    f"{self.path}: output {i} of {name} differs by {error:.2g} from the stored "
                    f"answer, more than {limit:.2g}: this version of {runtime} computes it "
                    f"wrongly on this machine. Use {runtime} {version}"
                )
