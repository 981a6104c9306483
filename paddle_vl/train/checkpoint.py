"""Layout of a run's output folder: names, files and loading of its checkpoints.

    output_dir/
      config.yaml                 resolved configuration
      run.json                    see paddle_vl.train.reporting.run_record
      metrics.jsonl loss.png      see paddle_vl.train.reporting.metrics
      actions.json                of a policy: predicted and true chunks of the last evaluation
      checkpoint-STEP/            model and processor files of HF, so that it loads as a model,
        optimizer.safetensors     arrays named `HF name/state`; split into several files with an
                                  index, as weights are, if large
        rollouts.safetensors      answers that are being learned, of a run that learns from rewards
        trainer_state.json        step, counters, data position; see `TrainerState`
        config.yaml               configuration it was trained with
        manifest.json             sizes and checksums of all other files
      predictions.jsonl           answers of the last evaluation that generated some
      final/                      the trained model without training state, and its manifest.json

With model.lora both have PEFT's `adapter_config.json` and `adapter_model.safetensors` instead of
the model's files; the base model is named, not copied. Of a policy final/ has the merged weights.
With train.ema final/ has the average of the weights. With train.best.load_at_end it is there since
the first evaluation, and has the model of the best so far.

A folder is written under a name that starts with `.partial-`, flushed to disk and renamed, see
`paddle_vl.train.saving.checkpoint_writer`; `paddle_vl.train.resume` checks its files.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.checkpoint.adapter_files import CONFIG_FILE
from paddle_vl.checkpoint.manifest import MANIFEST_FILE, check_weights
from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.files.stored_settings import Count, checked, read_section
from paddle_vl.files.text_file import read_json_object, write_text

logger = logging.getLogger(__name__)

OPTIMIZER_STEM = "optimizer"
STATE_FILE = "trainer_state.json"
# A folder with one of these is a model or adapter folder.
MODEL_FILES = ("config.json", CONFIG_FILE)
_PARTIAL = ".partial-"
_REMOVED = f"{_PARTIAL}removed-"
_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def partial_of(target: Path) -> Path:
    """Folder that is filled before it is renamed to `target`."""
    return target.with_name(_PARTIAL + target.name)


def set_aside(folder: Path) -> Path:
    """Rename a folder that is to be deleted, so that an interruption leaves no incomplete one."""
    doomed = folder.with_name(f"{_REMOVED}{folder.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    return folder.rename(doomed)


def finish_saves(output_dir: Path) -> None:
    """Rename the folder of a save that was interrupted when it was complete; delete the remains of
    other saves and of removals."""
    for path in output_dir.glob(_PARTIAL + "*"):
        target = output_dir / path.name.removeprefix(_PARTIAL)
        is_save = path.name.startswith(_PARTIAL) and not path.name.startswith(_REMOVED)
        # The manifest is the last file of a save.
        if is_save and not target.exists() and (path / MANIFEST_FILE).is_file():
            logger.warning("%s becomes %s: its save was interrupted", path, target.name)
            path.rename(target)
        else:
            logger.warning("removing %s, left by an interrupted save", path)
            shutil.rmtree(path)


def checkpoint_folders(output_dir: Path) -> list[tuple[int, Path]]:
    """Steps and folders of all checkpoints, complete or not, oldest first."""
    folders = [path for path in output_dir.glob("checkpoint-*") if path.is_dir()]
    named = [(match, path) for path in folders if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match.group(1)), path) for match, path in named)


def complete_checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """Steps and folders of the checkpoints with no `missing_files`, oldest first."""
    return [(s, path) for s, path in checkpoint_folders(output_dir) if not missing_files(path)]


def missing_files(checkpoint: Path) -> list[str]:
    """Files that a checkpoint lacks to be resumed from."""
    single = f"{OPTIMIZER_STEM}.safetensors"
    needed = (("config.yaml",), (STATE_FILE,), MODEL_FILES, (single, f"{single}.index.json"))
    return [
        names[0] for names in needed if not any((checkpoint / name).is_file() for name in names)
    ]


def model_folder(path: Path, verified: bool = True) -> Path:
    """The folder with model or adapter files for a path: the path itself, else the `final/` of a
    run, else its newest checkpoint. If `verified`, its weights are compared with its manifest.

    Raises:
        RuntimeError: there is none, or its weights differ from its manifest.
    """
    candidates = [path, path / "final"]
    candidates += [folder for _, folder in reversed(complete_checkpoints(path))]
    for candidate in candidates:
        if any((candidate / name).is_file() for name in MODEL_FILES):
            if verified:
                check_weights(candidate)
            return candidate
    raise RuntimeError(
        f"{path} is neither a model folder (it has no config.json) nor one of adapters (no "
        f"{CONFIG_FILE}) nor the output_dir of a run (it has neither final/ nor a complete "
        "checkpoint)"
    )


class StoredArrays(Mapping[str, np.ndarray]):
    """Arrays of the optimizer's files, of which only the parts that are used are read.

    Raises:
        RuntimeError: a file is missing or damaged.
    """

    def __init__(self, folder: Path):
        self._stored = read_checkpoint_headers(folder, OPTIMIZER_STEM)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._stored[name].mapped()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


@checked
class TrainerState:
    """Contents of trainer_state.json; those with a default are not in files of earlier versions."""

    step: Count
    nonfinite_updates: Count
    meter: dict[str, Any]
    data: dict[str, Any]
    owes_evaluation: bool = False
    tokens: Count | None = None
    sources: dict[str, Any] | None = None
    has_manifest: bool = False
    reference: str | None = None
    best: dict[str, Any] | None = None
    guard: dict[str, Any] | None = None
    rollouts: dict[str, Any] | None = None

    @classmethod
    def read(cls, folder: Path) -> "TrainerState":
        """
        Raises:
            RuntimeError: the file is missing or damaged.
            ValueError: it has other keys or values.
        """
        state = read_section(cls, load_state(folder), "top level")
        match = _NAME.fullmatch(folder.name)
        if match and int(match.group(1)) != state.step:
            raise ValueError(f"step is {state.step}, and the folder is {folder.name}")
        return state


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write trainer_state.json; `has_manifest` says that the checkpoint must have a manifest."""
    text = json.dumps(state | {"has_manifest": True}, indent=None, allow_nan=False) + "\n"
    write_text(folder / STATE_FILE, text)


def load_state(folder: Path) -> dict[str, Any]:
    """Read trainer_state.json.

    Raises:
        RuntimeError: the file is missing or damaged.
    """
    return read_json_object(folder / STATE_FILE, "a trainer state", "resume from another one")


def flush_to_disk(path: Path) -> None:
    """fsync a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
