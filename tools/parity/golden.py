"""Finds golden cases and models in any number of folders."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


@dataclass(frozen=True)
class GoldenCase:
    """Folder of a case: `meta.json` with tensors, a trajectory or processor tables."""

    name: str
    kind: str  # forward | generation | trajectory | processor
    folder: Path

    @cached_property
    def meta(self) -> dict:
        file = {"trajectory": "traj.json", "processor": "processor.json"}.get(
            self.kind, "meta.json"
        )
        return json.loads((self.folder / file).read_text(encoding="utf-8"))

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        file = "processor.safetensors" if self.kind == "processor" else "tensors.safetensors"
        return load_file(self.folder / file)

    @cached_property
    def gradients(self) -> dict[str, np.ndarray]:
        return load_file(self.folder / "grads.safetensors")

    def inputs(self) -> dict[str, np.ndarray]:
        """The `in.*` tensors that HF users would pass, without positions and type ids."""
        skipped = {"in.position_ids", "in.mm_token_type_ids", "in.cu_seqlens"}
        return {
            name[3:]: value
            for name, value in self.tensors.items()
            if name.startswith("in.") and name not in skipped
        }


class GoldenFolders:
    """All cases and models below the given folders."""

    def __init__(self, folders: list[Path]):
        missing = [str(folder) for folder in folders if not folder.is_dir()]
        if missing:
            raise ValueError(f"no such folder: {', '.join(missing)}")
        self.models = {
            file.parent.name: file.parent
            for folder in reversed(folders)
            for file in sorted(folder.rglob("config.json"))
        }
        found: dict[Path, GoldenCase] = {}
        for folder in folders:
            for case in _cases_below(folder):
                found.setdefault(case.folder.resolve(), case)
        self.cases = list(found.values())

    def model(self, name: str) -> Path:
        """Folder of a golden model.

        Raises:
            ValueError: no given folder holds it.
        """
        if name not in self.models:
            raise ValueError(
                f"model {name!r} is in none of the folders; they hold {sorted(self.models)}"
            )
        return self.models[name]

    def case(self, name: str) -> GoldenCase:
        """The case with this name.

        Raises:
            ValueError: no given folder holds it.
        """
        for case in self.cases:
            if case.name == name:
                return case
        raise ValueError(f"case {name!r} is in none of the folders")


def _cases_below(folder: Path) -> list[GoldenCase]:
    cases = []
    for file in sorted(folder.rglob("*.json")):
        name = file.parent.name
        if file.name == "meta.json":
            generated = json.loads(file.read_text(encoding="utf-8")).get("generated")
            kind = "forward" if generated is None else "generation"
            cases.append(GoldenCase(name, kind, file.parent))
        elif file.name == "traj.json":
            cases.append(GoldenCase(name, "trajectory", file.parent))
        elif file.name == "processor.json":
            cases.append(GoldenCase(name, "processor", file.parent))
    return cases
