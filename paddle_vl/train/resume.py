"""Resuming a run: which checkpoint, and which settings may differ from it."""

import logging
from pathlib import Path
from typing import Any

from paddle_vl.config.load import flatten, load_run_config
from paddle_vl.config.schema import RunConfig
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank
from paddle_vl.train.checkpoint import checkpoint_folders, complete_checkpoints, missing_files
from paddle_vl.train.saving.verify import Verdict, examine

logger = logging.getLogger(__name__)

# Settings that do not affect the training.
_NOT_COMPARED = ("train.output_dir", "train.resume_from_checkpoint")


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
    checkpoint = _named(Path(wanted), output_dir)
    verdict = examine(checkpoint, config.train.verify_checkpoint, ranks)
    if verdict.problems:
        raise RuntimeError(
            f"train.resume_from_checkpoint {checkpoint} is damaged: {'; '.join(verdict.problems)}. "
            "Name another one, or restore it from a copy"
        )
    if ranks.is_main:
        for mark in verdict.reasons:
            logger.warning("%s is marked: %s; continuing as it was named", checkpoint.name, mark)
    _say_unverified(checkpoint, verdict, ranks)
    return checkpoint


def _newest_usable(output_dir: Path, checksums: bool, ranks: SingleRank) -> Path | None:
    """The newest checkpoint that is neither damaged nor marked; None without checkpoints."""
    # All ranks use the list of rank 0.
    found = [path.name for _, path in checkpoint_folders(output_dir)]
    names = ranks.gathered(found)[0]
    passed_over: list[str] = []
    for name in reversed(names):
        checkpoint = output_dir / name
        verdict = examine(checkpoint, checksums, ranks)
        if verdict.reasons:
            passed_over.append(f"{name}: {'; '.join(verdict.reasons)}")
            continue
        if ranks.is_main:
            for text in passed_over:
                logger.warning("passed over %s", text)
        _say_unverified(checkpoint, verdict, ranks)
        return checkpoint
    if passed_over:
        raise RuntimeError(
            f"train.resume_from_checkpoint is auto, but none of the checkpoints in {output_dir} "
            f"can be used. {'. '.join(passed_over)}. Restore one from a copy, name a marked one by "
            "its path, or begin anew in another train.output_dir"
        )
    return None


def _say_unverified(checkpoint: Path, verdict: Verdict, ranks: SingleRank) -> None:
    if ranks.is_main and not verdict.has_manifest:
        logger.warning(
            "%s is not verified: it has no manifest.json, as checkpoints of earlier versions",
            checkpoint,
        )


def _named(checkpoint: Path, output_dir: Path) -> Path:
    """The named checkpoint.

    Raises:
        RuntimeError: it is incomplete, or output_dir has newer ones.
    """
    existing = complete_checkpoints(output_dir)
    if missing := missing_files(checkpoint):
        raise RuntimeError(
            f"train.resume_from_checkpoint {checkpoint} is not a complete checkpoint: it has no "
            f"{', '.join(missing)}"
        )
    inside = checkpoint.resolve().parent == output_dir.resolve()
    newer = [path.name for _, path in existing]
    if inside:
        newer = newer[newer.index(checkpoint.name) + 1 :] if checkpoint.name in newer else []
    if newer:
        raise RuntimeError(
            f"train.resume_from_checkpoint is {checkpoint} but train.output_dir {output_dir} also "
            f"holds {', '.join(newer)}, which this run would contradict: delete or move them, or "
            "choose another train.output_dir"
        )
    return checkpoint


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
    fixed = [
        text
        for key, text in changes.items()
        if _lies_in(key, config.fixed_settings) and not _is_moved(key, old.get(key), new.get(key))
    ]
    if _samples_per_micro_batch(saved) != _samples_per_micro_batch(config):
        fixed.append(
            "number of samples per micro-batch over all ranks "
            "(train.per_device_train_batch_size x parallel.dp_degree x sharding_degree): "
            f"{_samples_per_micro_batch(saved)} -> {_samples_per_micro_batch(config)}"
        )
    if fixed:
        raise ValueError(
            f"{checkpoint} cannot be continued with another "
            + "; ".join(fixed)
            + " (old -> new): restore the old values, or start a new run in another "
            "train.output_dir"
        )
    return list(changes.values())


def _samples_per_micro_batch(config: RunConfig) -> int:
    """Samples per micro-batch over all ranks, the unit of the data position."""
    parallel = config.parallel
    parts = parallel.dp_degree * parallel.sharding_degree
    return config.train.per_device_train_batch_size * parts


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
