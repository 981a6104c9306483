"""Finds golden cases, and the files that they name, in any number of folders.

A case of Qwen3-VL is a folder. A case of pi07 is `NAME.json`, with `NAME.safetensors` next to it;
the weights and inputs that it names may be in any of the folders.
"""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from safetensors.numpy import load_file

from paddle_vl.checkpoint.safetensors_io import read_header

# Files of a case of Qwen3-VL by kind: its description and its tensors.
_FILES = {
    "forward": ("meta.json", "tensors.safetensors"),
    "generation": ("meta.json", "tensors.safetensors"),
    "trajectory": ("traj.json", ""),
    "processor": ("processor.json", "processor.safetensors"),
    "hash": ("hash.json", "hash.safetensors"),
}
_NOT_GIVEN = {"in.position_ids", "in.mm_token_type_ids", "in.cu_seqlens"}
_PER_CAMERA = {
    "video": "videos",
    "vid_mask": "vid_masks",
    "subgoal_image": "subgoal_images",
    "subgoal_img_mask": "subgoal_img_masks",
}


@dataclass(frozen=True)
class Case:
    """A case: what it compares, and the JSON file that describes it."""

    name: str
    kind: str
    file: Path
    folders: "Folders[Any]"

    @cached_property
    def meta(self) -> dict:
        return json.loads(self.file.read_text(encoding="utf-8"))


class QwenCase(Case):
    """A case of Qwen3-VL."""

    folders: "QwenFolders"

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        return load_file(self.file.with_name(_FILES.get(self.kind, _FILES["forward"])[1]))

    @cached_property
    def gradients(self) -> dict[str, np.ndarray]:
        """Full gradients; of some parameters or none in a case that has their statistics."""
        return self._optional("grads.safetensors")

    @cached_property
    def gradient_stats(self) -> dict[str, np.ndarray]:
        """L2 norm, sum, largest entry and `sum_i g_i cos(i)` of every gradient that there is."""
        return self._optional("grad_stats.safetensors")

    def _optional(self, name: str) -> dict[str, np.ndarray]:
        file = self.file.with_name(name)
        return load_file(file) if file.is_file() else {}

    def inputs(self) -> dict[str, np.ndarray]:
        """The `in.*` tensors that HF users would pass, without positions and type ids."""
        return {
            name[3:]: value
            for name, value in self.tensors.items()
            if name.startswith("in.") and name not in _NOT_GIVEN
        }


class PI07Case(Case):
    """A case of pi07."""

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """The case's tensors and the inputs that it takes from another case; bfloat16 as
        float32."""
        found = {}
        if "inputs_from" in self.meta:
            found = _read(self.folders.file(self.meta["inputs_from"]))
            found = {name: value for name, value in found.items() if name.startswith("in.")}
        file = self.file.with_suffix(".safetensors")
        return found | (_read(file) if file.exists() else {})

    @property
    def is_bfloat16(self) -> bool:
        """Whether the case was computed in bfloat16."""
        return "bf16" in self.meta.get("weights_file", "")

    def inputs(self) -> dict[str, Any]:
        """The `in.*` tensors as model inputs, cameras in lists."""
        given: dict[str, Any] = {
            name[3:]: value for name, value in self.tensors.items() if name[:3] == "in."
        }
        for one, many in _PER_CAMERA.items():
            if f"{one}0" in given:
                given[many] = [given.pop(f"{one}{i}") for i in range(self.meta["n_cams"])]
        return given


AnyCase = TypeVar("AnyCase", bound=Case)


class Folders(ABC, Generic[AnyCase]):
    """All cases of a family below the given folders, each once, and the files beside them."""

    def __init__(self, folders: list[Path]):
        missing = [str(folder) for folder in folders if not folder.is_dir()]
        if missing:
            raise ValueError(f"no such folder: {', '.join(missing)}")
        self.folders = folders
        found: dict[Path, AnyCase] = {}
        for folder in folders:
            for file in sorted(folder.rglob("*.json")):
                if (case := self._case(file)) is not None:
                    found.setdefault(file.resolve(), case)
        self.cases = list(found.values())

    @abstractmethod
    def _case(self, file: Path) -> AnyCase | None:
        """The case that a file describes, if it does."""

    def file(self, name: str) -> Path:
        """A file by name.

        Raises:
            ValueError: it is in no folder.
        """
        for folder in self.folders:
            for file in sorted(folder.rglob(name)):
                return file
        raise ValueError(f"{name} is in none of the folders {[str(f) for f in self.folders]}")

    def case(self, start: str) -> AnyCase:
        """The case whose name begins with `start`.

        Raises:
            ValueError: it is in no folder.
        """
        for case in self.cases:
            if case.name.startswith(start):
                return case
        raise ValueError(f"no case {start}* in the folders {[str(f) for f in self.folders]}")


class QwenFolders(Folders[QwenCase]):
    """Cases of Qwen3-VL.

    Attributes:
        models: folders of the golden models, by name.
    """

    def __init__(self, folders: list[Path]):
        super().__init__(folders)
        self.models = {
            file.parent.name: file.parent
            for folder in reversed(folders)
            for file in sorted(folder.rglob("config.json"))
        }

    def _case(self, file: Path) -> QwenCase | None:
        kinds = [kind for kind, names in _FILES.items() if names[0] == file.name]
        if not kinds:
            return None
        is_generated = "generated" in json.loads(file.read_text(encoding="utf-8"))
        return QwenCase(file.parent.name, kinds[is_generated and len(kinds) > 1], file, self)


class Qwen35Folders(QwenFolders):
    """Cases of Qwen3.5; a trajectory is a file of its own for each model."""

    def _case(self, file: Path) -> QwenCase | None:
        if file.parent.name == "train_traj":
            return QwenCase(f"train_traj[{file.stem}]", "trajectory", file, self)
        if file.name != "meta.json":
            return None
        is_generated = "generated" in json.loads(file.read_text(encoding="utf-8"))
        kind = "generation" if is_generated else "forward"
        return QwenCase(file.parent.name, kind, file, self)


class Qwen4Folders(Qwen35Folders):
    """Cases of Qwen4-Exp: also prompts in pieces, constants of hashes, and model files."""

    def _case(self, file: Path) -> QwenCase | None:
        if file.name == "hash.json":
            return QwenCase(file.parent.name, "hash", file, self)
        if file.name == "config.json" and file.parent.parent.name == "models":
            return QwenCase(f"files[{file.parent.name}]", "files", file, self)
        case = super()._case(file)
        if case is not None and "splits" in case.meta:
            return QwenCase(case.name, "pieces", file, self)
        return case


class PaddleOCRFolders(Qwen35Folders):
    """Cases of PaddleOCR-VL: those of models, of the processor, and of templates."""

    def _case(self, file: Path) -> QwenCase | None:
        if file.name in ("processor.json", "templates.json"):
            return QwenCase(file.parent.name, file.stem, file, self)
        return super()._case(file)


class PI07Folders(Folders[PI07Case]):
    """Cases of pi07."""

    def _case(self, file: Path) -> PI07Case | None:
        kind = json.loads(file.read_text(encoding="utf-8")).get("kind")
        kind = "freeze" if file.stem == "freeze_modes" else kind
        return None if kind is None else PI07Case(file.stem, kind, file, self)


def _read(file: Path) -> dict[str, np.ndarray]:
    return {name: tensor.read(must_be_finite=False) for name, tensor in read_header(file).items()}
