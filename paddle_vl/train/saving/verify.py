"""Verification of a checkpoint: its files against its manifest.

All ranks get the same verdict: rank 0 lists the files to read, every rank reads a share of them,
and the findings are gathered.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_vl.checkpoint.adapter_files import TENSOR_FILE
from paddle_vl.checkpoint.manifest import (
    MANIFEST_FILE,
    WEIGHT_FILES,
    Manifest,
    damage_of_weights,
    damaged_files,
    files_as_json,
    files_from_json,
    files_in,
    listed_weights,
    shared_out,
)
from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers, read_header
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank
from paddle_vl.train.checkpoint import (
    MODEL_FILES,
    OPTIMIZER_STEM,
    STATE_FILE,
    load_state,
    missing_files,
)

logger = logging.getLogger(__name__)
# Files that a manifest must list: they determine what a resumed run does.
_LISTED = (
    *WEIGHT_FILES,
    *MODEL_FILES,
    f"{OPTIMIZER_STEM}*.safetensors*",
    STATE_FILE,
    "config.yaml",
)


@dataclass(frozen=True)
class Verdict:
    """Result of verifying a checkpoint.

    Attributes:
        problems: why it cannot be resumed from; empty if it can.
        nonfinite_updates: streak of skipped updates before it; above 0 it is marked.
        has_manifest: False for checkpoints of earlier versions, which cannot be compared.
    """

    problems: tuple[str, ...] = ()
    nonfinite_updates: int = 0
    has_manifest: bool = True

    @property
    def reasons(self) -> list[str]:
        """Why `auto` does not resume from it: problems and mark."""
        marks = []
        if self.nonfinite_updates:
            marks.append(
                f"the last {self.nonfinite_updates} updates before it were skipped, as a loss or "
                "the gradient norm was not finite"
            )
        return [*self.problems, *marks]


def examine(checkpoint: Path, checksums: bool = True, ranks: SingleRank = ONE_RANK) -> Verdict:
    """Verify a checkpoint. Called by all ranks, which get the same verdict.

    Args:
        checksums: read all files; otherwise only presence and sizes are checked.
    """
    begin = time.perf_counter()
    plans = ranks.gathered(_plan(checkpoint) if ranks.is_main else None)
    problems, plan = _damage(checkpoint, plans, checksums, ranks), plans[0]
    if plan["files"] and ranks.is_main and checksums and not problems:
        size = sum(file["size"] for file in plan["files"].values())
        seconds = time.perf_counter() - begin
        logger.info("%s is verified: %.2f GB in %.1f s", checkpoint.name, size / 1e9, seconds)
    return Verdict(tuple(problems), plan["nonfinite_updates"], plan["has_manifest"])


def check_pretrained(folder: Path, checksums: bool = True, ranks: SingleRank = ONE_RANK) -> None:
    """Compare the weights that a run starts from with their manifest, if there is one.

    Called by all ranks, which share the reading.

    Raises:
        RuntimeError: files are damaged; every rank names all of them.
    """

    def plan() -> dict[str, Any]:
        try:
            return {"files": files_as_json(listed_weights(folder)), "problems": []}
        except RuntimeError as error:
            return {"files": {}, "problems": [str(error)]}

    plans = ranks.gathered(plan() if ranks.is_main else None)
    if problems := _damage(folder, plans, checksums, ranks):
        raise RuntimeError(f"model.pretrained {damage_of_weights(folder, problems)}")


def _damage(folder: Path, plans: Sequence[Any], checksums: bool, ranks: SingleRank) -> list[str]:
    """The problems of rank 0's plan, or else those of its files, the same list on every rank.

    Args:
        plans: by rank.
    """
    plan = plans[0]
    if plan["problems"]:
        return plan["problems"]
    own = shared_out(files_from_json(plan["files"]), ranks.rank, len(plans))
    found = ranks.gathered(damaged_files(folder, own, checksums)) if plan["files"] else []
    return [problem for of_rank in found for problem in of_rank]


def _plan(checkpoint: Path) -> dict[str, Any]:
    """Findings of rank 0 without reading large files, and the files to read, as a JSON object."""
    plan: dict[str, Any] = {"problems": [], "files": {}, "nonfinite_updates": 0}
    plan["has_manifest"] = True
    try:
        manifest = Manifest.read(checkpoint)
        plan["has_manifest"] = manifest is not None
        if manifest is not None:
            plan["files"] = files_as_json(manifest.files)
            plan["nonfinite_updates"] = manifest.nonfinite_updates
            plan["problems"] = _missing(checkpoint) or _not_fitting(checkpoint, manifest)
        else:
            plan["problems"] = _missing(checkpoint) or _damage_without_manifest(checkpoint)
    except (RuntimeError, OSError, ValueError) as error:
        plan["problems"] = [str(error)]
    return plan


def _missing(checkpoint: Path) -> list[str]:
    missing = missing_files(checkpoint)
    return [f"it has no {', '.join(missing)}"] if missing else []


def _not_fitting(checkpoint: Path, manifest: Manifest) -> list[str]:
    names = [name for name in files_in(checkpoint, _LISTED) if name not in manifest.files]
    if names:
        return [f"{MANIFEST_FILE} has no entry of {', '.join(names)}"]
    state = load_state(checkpoint)
    own = (manifest.step, manifest.nonfinite_updates)
    if own != (state.get("step"), state.get("nonfinite_updates")):
        return [f"{MANIFEST_FILE} and {STATE_FILE} are of different checkpoints"]
    return []


def _damage_without_manifest(checkpoint: Path) -> list[str]:
    """Damage of a checkpoint of an earlier version: unreadable JSON or truncated tensors."""
    if load_state(checkpoint).get("has_manifest"):
        return [f"{MANIFEST_FILE} is missing"]
    read_checkpoint_headers(checkpoint, OPTIMIZER_STEM)
    if (checkpoint / TENSOR_FILE).is_file():
        read_header(checkpoint / TENSOR_FILE)
    else:
        read_checkpoint_headers(checkpoint)
    return []
