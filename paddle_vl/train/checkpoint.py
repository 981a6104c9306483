"""Checkpoints of a run: written completely or not at all, found, loaded and pruned.

    output_dir/
      config.yaml                 resolved configuration
      run.json                    see paddle_vl.train.reporting.run_record
      metrics.jsonl loss.png      see paddle_vl.train.reporting.metrics
      checkpoint-STEP/            model and processor files of HF, so that it loads as a model,
        optimizer.safetensors     `HF name/state` arrays; like the weights in several files and an
                                  index of them when they are large or several processes write
        trainer_state.json        step, counters, data position
        config.yaml               configuration it was trained with
      final/                      the trained model, without training state

With model.lora, `adapter_config.json` and `adapter_model.safetensors` of PEFT stand in place of the
model's files, in both; they name the base, which is not repeated.

A folder is filled under a name that starts with `.partial-`, flushed to disk, and renamed.
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

from paddle_vl.models.checkpoint.adapter_files import CONFIG_FILE
from paddle_vl.models.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.train.processes import ONE_PROCESS, SingleProcess

logger = logging.getLogger(__name__)

OPTIMIZER_STEM = "optimizer"
STATE_FILE = "trainer_state.json"
# One of them says that a folder is a model, or adapters of one.
_MODEL_FILES = ("config.json", CONFIG_FILE)
_PARTIAL = ".partial-"
_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def write_folder(
    target: Path, fill: Callable[[Path], None], processes: SingleProcess = ONE_PROCESS
) -> None:
    """Make `target` hold what `fill` writes into the folder it is given; an older one is replaced.

    Whenever a process ends on the way, `target` is the complete old folder, or absent, or the
    complete new one. All processes call this, and those that hold one whole model fill it together;
    the folder must be on a file system that they share.
    """
    partial = target.with_name(_PARTIAL + target.name)
    if processes.is_main:
        target.parent.mkdir(parents=True, exist_ok=True)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
    processes.wait()
    if processes.holds_model:
        fill(partial)
    processes.wait()
    if processes.is_main:
        for path in [*partial.rglob("*"), partial]:
            _flush_to_disk(path)
        if target.exists():
            remove_folder(target)
        partial.rename(target)
        _flush_to_disk(target.parent)
    processes.wait()


def remove_folder(folder: Path) -> None:
    """Delete a folder so that an interruption does not leave a half-empty one under its name."""
    doomed = folder.with_name(f"{_PARTIAL}removed-{folder.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def remove_partial_folders(output_dir: Path) -> None:
    """Clear away what an interrupted save or removal left."""
    for path in output_dir.glob(_PARTIAL + "*"):
        logger.warning("removing %s, left by an interrupted save", path)
        shutil.rmtree(path)


def complete_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the usable checkpoints, oldest first."""
    found = []
    for path in output_dir.glob("checkpoint-*"):
        match = _NAME.fullmatch(path.name)
        if match and not missing_files(path):
            found.append((int(match.group(1)), path))
    return sorted(found)


def missing_files(checkpoint: Path) -> list[str]:
    """Files without which a checkpoint cannot be resumed from."""
    needed = ["config.yaml", STATE_FILE]
    missing = [name for name in needed if not (checkpoint / name).is_file()]
    if not any((checkpoint / name).is_file() for name in _MODEL_FILES):
        missing.append(_MODEL_FILES[0])
    single = f"{OPTIMIZER_STEM}.safetensors"
    if not any((checkpoint / name).is_file() for name in (single, f"{single}.index.json")):
        missing.append(single)
    return missing


def model_folder(path: Path) -> Path:
    """The model or adapters that a path names: itself, or a run's final ones, or the newest
    checkpoint's.

    Raises:
        RuntimeError: there is none.
    """
    candidates = [path, path / "final"]
    candidates += [folder for _, folder in reversed(complete_checkpoints(path))]
    for candidate in candidates:
        if any((candidate / name).is_file() for name in _MODEL_FILES):
            return candidate
    raise RuntimeError(
        f"{path} is neither a model folder (it has no config.json) nor one of adapters (no "
        f"{CONFIG_FILE}) nor the output_dir of a run (it has neither final/ nor a complete "
        "checkpoint)"
    )


def prune_checkpoints(output_dir: Path, limit: int | None) -> None:
    """Delete the oldest checkpoints beyond `limit`; the newest complete one always stays."""
    if limit is not None:
        for _, path in complete_checkpoints(output_dir)[: -max(limit, 1)]:
            remove_folder(path)


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
    """Write the trainer's own state."""
    text = json.dumps(state, indent=None, allow_nan=False) + "\n"
    (folder / STATE_FILE).write_text(text, encoding="utf-8")


def load_state(folder: Path) -> dict[str, Any]:
    """Read the trainer's own state.

    Raises:
        RuntimeError: the file is missing or damaged.
    """
    path = folder / STATE_FILE
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise RuntimeError(f"{path} cannot be read ({error}); resume from another one") from error


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
