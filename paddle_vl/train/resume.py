"""Resuming a run: which checkpoint, and which settings may differ from it.

A checkpoint's files are compared with its manifest. All ranks get the same verdict: every rank
reads a share of the files, and the findings are gathered.
"""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paddle_vl.checkpoint.adapter_files import TENSOR_FILE
from paddle_vl.checkpoint.manifest import (
    MANIFEST_FILE,
    FileSum,
    Manifest,
    damage_of_weights,
    damaged_files,
    listed_weights,
    shared_out,
)
from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers, read_header
from paddle_vl.config.families import model_values
from paddle_vl.config.load import flatten, load_run_config
from paddle_vl.config.schema import RunConfig
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank
from paddle_vl.train.checkpoint import (
    OPTIMIZER_STEM,
    checkpoint_folders,
    complete_checkpoints,
    load_state,
    missing_files,
)

logger = logging.getLogger(__name__)
# Settings that do not affect the training.
_NOT_COMPARED = ("train.output_dir", "train.resume_from_checkpoint")


class Verdict(NamedTuple):
    """Result of verifying a checkpoint.

    Attributes:
        problems: why it cannot be resumed from; empty if it can.
        has_manifest: False for checkpoints of earlier versions, which cannot be compared.
    """

    problems: tuple[str, ...]
    has_manifest: bool


def examine(checkpoint: Path, checksums: bool = True, ranks: SingleRank = ONE_RANK) -> Verdict:
    """Verify a checkpoint. Called by all ranks, which get the same verdict.

    Args:
        checksums: read all files; otherwise only presence and sizes are checked.
    """
    begin, manifest, files, problems = time.perf_counter(), None, {}, []
    try:
        manifest = Manifest.read(checkpoint)
        files = {} if manifest is None else manifest.files
        if (misfit := _misfit(checkpoint, manifest)) is not None:
            problems = [misfit]
        else:
            problems = _damage_of_share(checkpoint, files, checksums, ranks)
    except (RuntimeError, OSError, ValueError) as error:
        problems = [str(error)]
    problems = _of_all(problems, ranks)
    if files and ranks.is_main and checksums and not problems:
        size = sum(file.size for file in files.values())
        seconds = time.perf_counter() - begin
        logger.info("%s is verified: %.2f GB in %.1f s", checkpoint.name, size / 1e9, seconds)
    return Verdict(tuple(problems), has_manifest=manifest is not None)


def check_pretrained(folder: Path, checksums: bool = True, ranks: SingleRank = ONE_RANK) -> None:
    """Compare the weights that a run starts from with their manifest, if there is one.

    Called by all ranks, which share the reading.

    Raises:
        RuntimeError: files are damaged; every rank names all of them.
    """
    try:
        problems = _damage_of_share(folder, listed_weights(folder), checksums, ranks)
    except RuntimeError as error:
        problems = [str(error)]
    if problems := _of_all(problems, ranks):
        raise RuntimeError(f"model.pretrained {damage_of_weights(folder, problems)}")


def _damage_of_share(
    folder: Path, files: Mapping[str, FileSum], checksums: bool, ranks: SingleRank
) -> list[str]:
    own = shared_out(files, ranks.rank, ranks.world_size)
    return damaged_files(folder, own, checksums)


def _of_all(problems: list[str], ranks: SingleRank) -> list[str]:
    """The problems that any rank has found, the same list on every rank."""
    found = ranks.gathered(problems)
    return list(dict.fromkeys(problem for of_rank in found for problem in of_rank))


def _misfit(checkpoint: Path, manifest: Manifest | None) -> str | None:
    """What is missing without which it cannot be resumed from; None if nothing is.

    Raises:
        RuntimeError: damage of a checkpoint of an earlier version, which has no manifest:
            unreadable JSON or truncated tensors.
    """
    if missing := missing_files(checkpoint):
        return f"it has no {', '.join(missing)}"
    if manifest is not None:
        return None
    state = load_state(checkpoint)
    if state.get("has_manifest"):
        return f"{MANIFEST_FILE} is missing"
    read_checkpoint_headers(checkpoint, OPTIMIZER_STEM)
    if (checkpoint / TENSOR_FILE).is_file():
        read_header(checkpoint / TENSOR_FILE)
    else:
        read_checkpoint_headers(checkpoint)
    return None


def checkpoint_to_resume(config: RunConfig, ranks: SingleRank = ONE_RANK) -> Path | None:
    """The checkpoint of train.resume_from_checkpoint; None for a new run.

    Its files are compared with its manifest. Called by all ranks, which share the reading and get
    the same result.

    Raises:
        RuntimeError: the named checkpoint is damaged or incomplete, or output_dir has newer ones;
            or it is `auto` and none of the checkpoints can be used.
    """
    wanted, output_dir = config.train.resume_from_checkpoint, Path(config.train.output_dir)
    if wanted == "none":
        return None
    if wanted == "auto":
        return _newest_usable(output_dir, config.train.verify_checkpoint, ranks)
    checkpoint = Path(wanted)
    existing = [path.name for _, path in complete_checkpoints(output_dir)]
    if missing := missing_files(checkpoint):
        raise RuntimeError(
            f"train.resume_from_checkpoint {checkpoint} is not a complete checkpoint: it has no "
            f"{', '.join(missing)}"
        )
    if checkpoint.resolve().parent == output_dir.resolve():
        is_listed = checkpoint.name in existing
        existing = existing[existing.index(checkpoint.name) + 1 :] if is_listed else []
    if existing:
        raise RuntimeError(
            f"train.resume_from_checkpoint is {checkpoint} but train.output_dir {output_dir} also "
            f"holds {', '.join(existing)}, which this run would contradict: delete or move them, "
            "or choose another train.output_dir"
        )
    verdict = examine(checkpoint, config.train.verify_checkpoint, ranks)
    if verdict.problems:
        raise RuntimeError(
            f"train.resume_from_checkpoint {checkpoint} is damaged: {'; '.join(verdict.problems)}. "
            "Name another one, or restore it from a copy"
        )
    _tell(ranks, [], checkpoint, verdict)
    return checkpoint


def _tell(ranks: SingleRank, warnings: list[str], checkpoint: Path, verdict: Verdict) -> None:
    if not verdict.has_manifest:
        unverified = "is not verified: it has no manifest.json, as checkpoints of earlier versions"
        warnings = [*warnings, f"{checkpoint} {unverified}"]
    for text in warnings if ranks.is_main else ():
        logger.warning("%s", text)


def _newest_usable(output_dir: Path, checksums: bool, ranks: SingleRank) -> Path | None:
    """The newest checkpoint that is not damaged; None without checkpoints."""
    # All ranks use the list of rank 0.
    names = ranks.gathered([path.name for _, path in checkpoint_folders(output_dir)])[0]
    passed_over: list[str] = []
    for name in reversed(names):
        verdict = examine(output_dir / name, checksums, ranks)
        if not verdict.problems:
            told = [f"passed over {text}" for text in passed_over]
            _tell(ranks, told, output_dir / name, verdict)
            return output_dir / name
        passed_over.append(f"{name}: {'; '.join(verdict.problems)}")
    if passed_over:
        raise RuntimeError(
            f"train.resume_from_checkpoint is auto, but none of the checkpoints in {output_dir} "
            f"can be used. {'. '.join(passed_over)}. Restore one from a copy, "
            "or begin anew in another train.output_dir"
        )
    return None


def changed_settings(checkpoint: Path, config: RunConfig) -> list[str]:
    """Settings that differ from the checkpoint's, as `key: old -> new`.

    Raises:
        ValueError: settings of `FIXED` differ; all are named.
    """
    saved = load_run_config(checkpoint / "config.yaml")
    old, new = flatten(saved.model_dump()), flatten(config.model_dump())
    changes = {
        key: f"{key}: {_shown(old, key)} -> {_shown(new, key)}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and not _lies_in(key, _NOT_COMPARED)
    }
    stored = flatten(model_values(checkpoint))
    fixed = [
        text
        for key, text in changes.items()
        if _lies_in(key, config.fixed_settings)
        and not _is_moved(key, old.get(key), new.get(key))
        # What the run of then left to a default may be named now.
        and (key in old or stored.get(key.removeprefix("model.config.")) != new.get(key))
    ]
    # Samples per micro-batch over all ranks, the unit of the data position.
    before, now = (
        c.train.per_device_train_batch_size * c.parallel.data_degree for c in (saved, config)
    )
    if before != now:
        fixed.append(
            "number of samples per micro-batch over all ranks "
            "(train.per_device_train_batch_size x parallel.dp_degree x sharding_degree / "
            "cp_degree): "
            f"{before} -> {now}"
        )
    if fixed:
        raise ValueError(
            f"{checkpoint} cannot be continued with another "
            + "; ".join(fixed)
            + " (old -> new): restore the old values, or start a new run in another "
            "train.output_dir"
        )
    return list(changes.values())


def _lies_in(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(name + ".") for name in names)


def _is_moved(key: str, old: Any, new: Any) -> bool:
    """Whether the paths of data.train differ and nothing else. What the files hold is compared when
    the position in the data is restored."""
    if key != "data.train" or not (isinstance(old, list) and isinstance(new, list)):
        return False
    kept = [
        [{**entry, "path": None} if isinstance(entry, dict) else None for entry in entries]
        for entries in (old, new)
    ]
    return kept[0] == kept[1]


def _shown(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not set"
