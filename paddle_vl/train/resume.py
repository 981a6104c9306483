"""Continuing a run: which checkpoint, what may have changed in its configuration, what must not."""

from pathlib import Path
from typing import Any

from paddle_vl.config.load import flatten, load_run_config
from paddle_vl.config.schema import RunConfig
from paddle_vl.train.checkpoint import complete_checkpoints, missing_files

# Settings, or sections of them, that give the saved weights, optimizer state, data position or
# random state their meaning.
FIXED = (
    "model.pretrained",
    "model.config",
    "model.compute_dtype",
    "model.freeze",
    "model.lora",
    "data.train",
    "data.synthetic_samples",
    "data.groups",
    "data.fields",
    "data.drops",
    "data.processor",
    "data.max_length",
    "data.packing",
    "data.packing_length",
    "data.max_vision_tokens_per_row",
    "data.on_bad_sample",
    "data.min_pixels",
    "data.max_pixels",
    "train.seed",
    "train.gradient_accumulation_steps",
    "train.loss_weighting",
)
# Where a run writes and how it was started say nothing about the run itself.
_NOT_COMPARED = ("train.output_dir", "train.resume_from_checkpoint")


def checkpoint_to_resume(config: RunConfig) -> Path | None:
    """The checkpoint that train.resume_from_checkpoint asks for; None for a fresh start.

    Raises:
        RuntimeError: the named one is not complete, or output_dir holds newer ones than it.
    """
    wanted, output_dir = config.train.resume_from_checkpoint, Path(config.train.output_dir)
    if wanted == "none":
        return None
    existing = complete_checkpoints(output_dir)
    if wanted == "auto":
        return existing[-1][1] if existing else None
    checkpoint = Path(wanted)
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
    """What differs from the configuration of the checkpoint, as `key: old -> new`.

    Raises:
        ValueError: a setting that must not change did, with all of those.
    """
    saved = load_run_config(checkpoint / "config.yaml")
    old, new = flatten(saved.model_dump()), flatten(config.model_dump())
    changes = {
        key: f"{key}: {_shown(old, key)} -> {_shown(new, key)}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and not _lies_in(key, _NOT_COMPARED)
    }
    fixed = [text for key, text in changes.items() if _lies_in(key, FIXED)]
    if _samples_per_micro_batch(saved) != _samples_per_micro_batch(config):
        fixed.append(
            "number of samples per micro-batch over all processes "
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
    """What the data position counts in; processes may share it in any way."""
    parallel = config.parallel
    parts = parallel.dp_degree * parallel.sharding_degree
    return config.train.per_device_train_batch_size * parts


def _lies_in(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(name + ".") for name in names)


def _shown(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not set"
