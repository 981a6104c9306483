"""An export's folder: programs, their weights, a stored answer of each, and the manifest.

export.json            what is in the folder, see `ExportManifest`
NAME.json              a program in Paddle's format
WEIGHTS.pdiparams      weights, once for all programs that have the same ones
onnx/NAME.onnx         a program in ONNX, if asked for; its weights are in onnx/weights.bin
check.safetensors      for each program inputs and outputs of the model itself
config.json, ...       the model's configuration, tokenizer and processor files
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import numpy as np
import paddle
from paddle import Tensor
from pydantic import Field

from paddle_vl.checkpoint.manifest import damaged_files, files_as_json, files_from_json
from paddle_vl.checkpoint.safetensors_io import read_header
from paddle_vl.export.program import OnnxProgram, Program
from paddle_vl.files.stored_settings import Listed, Part, checked, read_section
from paddle_vl.files.text_file import read_json_object, shown

MANIFEST_FILE = "export.json"
CHECK_FILE = "check.safetensors"
ONNX_FOLDER = "onnx"
ONNX_WEIGHTS = "weights.bin"
FORMAT = 2
REMEDY = "export the checkpoint again (paddle-vl export)"
Runtime = Literal["paddle", "onnxruntime"]
RUNTIMES = get_args(Runtime)
AnyProgram = Program | OnnxProgram
_Count = Annotated[int, Field(ge=1, le=1 << 16)]
_Size = Annotated[int, Field(ge=-1)]
_DType = Literal["float32", "int64", "int32", "bool"]
# Of stored answers, relative to their largest value: sums in another order.
_TOLERANCE = 1e-4
# Kinds of files that are read beside the programs.
_READ = (".json", ".safetensors")
S = TypeVar("S")


def program_file(kind: str, name: str) -> str:
    """Path of a program in an export's folder.

    Args:
        kind: `programs` or `onnx`, as in the manifest.
    """
    return f"{ONNX_FOLDER}/{name}.onnx" if kind == "onnx" else f"{name}.json"


def as_tensor(array: np.ndarray, dtype: str) -> Tensor:
    """A copy of an array as an input of that dtype."""
    tensor: Any = paddle.to_tensor(array.copy())
    return tensor.astype(dtype)


@checked
class ProgramEntry:
    """A program of the folder.

    Attributes:
        weights: file of its weights.
        inputs: shape and dtype by name, in order; -1 for a size that is free.
        num_outputs: number of output tensors.
    """

    weights: str
    inputs: dict[str, Listed[tuple[Listed[list[_Size]], _DType]]]
    num_outputs: _Count


@checked
class ExportManifest:
    """Content of `export.json`.

    Attributes:
        model_type: of the model, by which its family is found.
        sizes: what the runtime must know of the model's configuration.
        source: the exported checkpoint: its folder's name, and the checksums of its files.
        versions: of paddle_vl and paddle.
        programs: by name.
        onnx: programs in ONNX by name; none unless they were asked for.
        files: size and checksum of every other file.
    """

    model_type: str
    sizes: dict[str, Any]
    source: dict[str, Any]
    versions: dict[str, str]
    programs: dict[str, Part[ProgramEntry]]
    onnx: dict[str, Part[ProgramEntry]] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        # The files that its programs are read from.
        needed = []
        for kind in ("programs", "onnx"):
            for name, entry in getattr(self, kind).items():
                needed += [program_file(kind, name), entry.weights]
        for name in (*needed, CHECK_FILE):
            if name not in self.files:
                raise ValueError(f"its files have no {shown(name)}")
        if "paddle" not in self.versions or (self.onnx and "onnxruntime" not in self.versions):
            raise ValueError("a version of a runtime is missing")

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
            found = cls(**values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(folder, error) from error
        return found


def _damaged(folder: Path, error: Exception) -> RuntimeError:
    return RuntimeError(f"{folder / MANIFEST_FILE} is damaged ({str(error)[:400]}): {REMEDY}")


@dataclass(frozen=True)
class ExportFolder:
    """A folder whose files are complete and undamaged.

    Attributes:
        runtime: what runs its programs.
    """

    path: Path
    manifest: ExportManifest
    runtime: Runtime = "paddle"

    @classmethod
    def open(cls, path: Path, runtime: Runtime = "paddle") -> "ExportFolder":
        """Check every file's size and checksum.

        Raises:
            ValueError, RuntimeError: see `ExportManifest.read`; a file is missing or damaged.
        """
        manifest = ExportManifest.read(path)
        damaged = damaged_files(path, manifest.files)
        damaged += [
            f"{file.name} is not among the files of {MANIFEST_FILE}"
            for file in sorted(path.iterdir())
            if file.suffix in _READ and file.name not in {*manifest.files, MANIFEST_FILE}
        ]
        if damaged:
            raise RuntimeError(f"{path} is damaged: {'; '.join(damaged)}. {REMEDY}")
        return cls(path, manifest, runtime)

    def sizes(self, cls: type[S]) -> S:
        """The manifest's `sizes` as a checked dataclass.

        Raises:
            RuntimeError: other names, types or ranges.
        """
        try:
            return read_section(cls, self.manifest.sizes, "sizes")
        except ValueError as error:
            raise _damaged(self.path, error) from error

    def program(self, name: str) -> AnyProgram:
        """A program, ready to run, after its answer to the stored input was found right.

        Raises:
            ValueError: the folder has no program of this name for the runtime.
            RuntimeError: the answer is wrong, as an optimization pass of the runtime can make it.
        """
        is_onnx = self.runtime == "onnxruntime"
        kind = "onnx" if is_onnx else "programs"
        entry = getattr(self.manifest, kind).get(name)
        if entry is None:
            raise ValueError(
                f"{self.path} has no program {name} for {self.runtime}: export the checkpoint "
                f"again (paddle-vl export{' --onnx' if is_onnx else ''})"
            )
        file = self.path / program_file(kind, name)
        if is_onnx:
            program: AnyProgram = OnnxProgram(file, entry.inputs)
        else:
            program = Program(file, self.path / entry.weights, entry.inputs)
        self._check_answer(program, entry, f"onnx.{name}" if is_onnx else name)
        return program

    def _check_answer(self, program: AnyProgram, entry: ProgramEntry, name: str) -> None:
        try:
            stored = read_header(self.path / CHECK_FILE)
            inputs = {
                key: as_tensor(stored[f"{name}.input.{key}"].read(), dtype)
                for key, (_, dtype) in entry.inputs.items()
            }
            outputs = [x.astype("float32").numpy() for x in program(inputs)]
            answers = [stored[f"{name}.output.{i}"].read() for i in range(entry.num_outputs)]
        except Exception as error:
            raise RuntimeError(
                f"{self.path}: {name} does not run on the input in {CHECK_FILE} "
                f"({str(error).strip()[-300:]}): {REMEDY}"
            ) from error
        runtime, version = self.runtime, self.manifest.versions[self.runtime]
        for i, (output, answer) in enumerate(zip(outputs, answers, strict=True)):
            found, wanted = output.astype(np.float64), answer.astype(np.float64)
            error = np.abs(found - wanted).max(initial=0.0)
            limit = _TOLERANCE * max(np.abs(wanted).max(initial=0.0), 1.0)
            if not error <= limit:
                raise RuntimeError(
                    f"{self.path}: output {i} of {name} differs by {error:.2g} from the stored "
                    f"answer, more than {limit:.2g}: this version of {runtime} computes it "
                    f"wrongly on this machine. Use {runtime} {version}"
                )
