"""Checkpoints of a run on disk: what they are called and consist of, found and loaded.

    output_dir/
      config.yaml                 resolved configuration
      run.json                    see paddle_vl.train.reporting.run_record
      metrics.jsonl loss.png      see paddle_vl.train.reporting.metrics
      checkpoint-STEP/            model and processor files of HF, so that it loads as a model,
        optimizer.safetensors     `HF name/state` arrays; like the weights in several files and an
                                  index of them when they are large or several processes write
        trainer_state.json        step, counters, data position
        config.yaml               configuration it was trained with
        manifest.json             sizes and checksums of all other files
      final/                      the trained model, without training state, and its manifest.json

With model.lora, `adapter_config.json` and `adapter_model.safetensors` of PEFT stand in place of the
model's files, in both; they name the base, which is not repeated.

A folder is filled under a name that starts with `.partial-`, flushed to disk, and renamed: see
`paddle_vl.train.saving.checkpoint_writer`. Whether its files are still what was written says
`paddle_vl.train.saving.verify`.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.checkpoint.adapter_files import CONFIG_FILE
from paddle_vl.checkpoint.manifest import check_weights
from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers

logger = logging.getLogger(__name__)

OPTIMIZER_STEM = "optimizer"
STATE_FILE = "trainer_state.json"
# One of them says that a folder is a model, or adapters of one.
MODEL_FILES = ("config.json", CONFIG_FILE)
_PARTIAL = ".partial-"
_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def partial_of(target: Path) -> Path:
    """Where a folder is filled before it gets its name."""
    return target.with_name(_PARTIAL + target.name)


def remove_folder(folder: Path, then: Callable[[], object] | None = None) -> None:
    """Delete a folder so that an interruption does not leave a half-empty one under its name.

    Args:
        then: called when the name is free and before anything is deleted.
    """
    doomed = folder.with_name(f"{_PARTIAL}removed-{folder.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    folder.rename(doomed)
    if then is not None:
        then()
    shutil.rmtree(doomed)


def remove_partial_folders(output_dir: Path) -> None:
    """Clear away what an interrupted save or removal left."""
    for path in output_dir.glob(_PARTIAL + "*"):
        logger.warning("removing %s, left by an interrupted save", path)
        shutil.rmtree(path)


def checkpoint_folders(output_dir: Path) -> list[tuple[int, Path]]:
    """Steps and folders of all checkpoints, whatever is in them, oldest first."""
    found = []
    for path in output_dir.glob("checkpoint-*"):
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match.group(1)), path))
    return sorted(found)


def complete_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the checkpoints that have all kinds of files, oldest first."""
    return [(s, path) for s, path in checkpoint_folders(output_dir) if not missing_files(path)]


def missing_files(checkpoint: Path) -> list[str]:
    """Files without which a checkpoint cannot be resumed from."""
    needed = ["config.yaml", STATE_FILE]
    missing = [name for name in needed if not (checkpoint / name).is_file()]
    if not any((checkpoint / name).is_file() for name in MODEL_FILES):
        missing.append(MODEL_FILES[0])
    single = f"{OPTIMIZER_STEM}.safetensors"
    if not any((checkpoint / name).is_file() for name in (single, f"{single}.index.json")):
        missing.append(single)
    return missing


def model_folder(path: Path) -> Path:
    """The model or adapters that a path names: itself, or a run's final ones, or the newest
    checkpoint's.

    Raises:
        RuntimeError: there is none, or its weights are not those of its manifest.
    """
    candidates = [path, path / "final"]
    candidates += [folder for _, folder in reversed(complete_checkpoints(path))]
    for candidate in candidates:
        if any((candidate / name).is_file() for name in MODEL_FILES):
            check_weights(candidate)
            return candidate
    raise RuntimeError(
        f"{path} is neither a model folder (it has no config.json) nor one of adapters (no "
        f"{CONFIG_FILE}) nor the output_dir of a run (it has neither final/ nor a complete "
        "checkpoint)"
    )


class StoredArrays(Mapping[str, np.ndarray]):
    """The arrays of the optimizer's files, read when they are asked for.

    Raises:
        RuntimeError: a file is missing or damaged.
    """

    def __init__(self, folder: Path):
        self._stored = read_checkpoint_headers(folder, OPTIMIZER_STEM)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._stored[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the trainer's own state, and that a manifest is to come with it."""
    text = json.dumps(state | {"has_manifest": True}, indent=None, allow_nan=False) + "\n"
    (folder / STATE_FILE).write_text(text, encoding="utf-8")


def load_state(folder: Path) -> dict[str, Any]:
    """Read the trainer's own state.

    Raises:
        RuntimeError: the file is missing or damaged.
    """
    path = folder / STATE_FILE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise RuntimeError(f"{path} cannot be read ({error}); resume from another one") from error
    return state


def flush_to_disk(path: Path) -> None:
    """Have what a file or the entries of a folder hold on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
