"""Bit-for-bit comparison of a disturbed run with the undisturbed one."""

import json
import re
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from faults.runs import metrics

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# Its last line is the first that is not indented.
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n((?:[ \t].*\n)*)(\S.*)", re.M)
# Paddle's import runs `ldd --version`, which Ctrl-C ends with it.
_PADDLES_LDD = "in less_than_ver"
_COMPARED_METRICS = ("loss", "grad_norm", "eval_loss", "learning_rate")


def tracebacks(output: str) -> list[str]:
    """Exceptions whose traceback a run has printed, but for Ctrl-C before the package runs."""
    return [
        f"a traceback of {error[:200]}"
        for frames, error in _TRACEBACK.findall(output)
        if error != "KeyboardInterrupt" and _PADDLES_LDD not in frames
    ]


def checkpoint_steps(output_dir: Path) -> set[int]:
    """Steps of the folders that are named as complete checkpoints."""
    matches = (_CHECKPOINT.fullmatch(path.name) for path in output_dir.glob("checkpoint-*"))
    return {int(match.group(1)) for match in matches if match}


def damage_of(checkpoint: Path, reference: Path) -> list[str]:
    """Differences between a checkpoint and that of the undisturbed run."""
    differences = []
    for stem in ("model", "optimizer"):
        differences += _tensor_differences(checkpoint, reference, stem)
    states = []
    for folder in (checkpoint, reference):
        try:
            state = json.loads((folder / "trainer_state.json").read_text())
            states.append((state["step"], state["data"]))
        except (OSError, ValueError, KeyError) as error:
            return [*differences, f"{folder.name}/trainer_state.json: {error}"]
    if states[0] != states[1]:
        differences.append(f"{checkpoint.name}: step or data position {states[0]}, not {states[1]}")
    return differences


def damaged_checkpoints(output_dir: Path, reference: Path) -> dict[int, list[str]]:
    """Steps of checkpoints that differ from the undisturbed run, with the differences."""
    found = {}
    for step in sorted(checkpoint_steps(output_dir)):
        name = f"checkpoint-{step}"
        # The run was stopped before its first step; the final comparison covers it.
        if step == 0:
            continue
        if differences := damage_of(output_dir / name, reference / name):
            found[step] = differences
    return found


def vanished_checkpoints(before: set[int], after: set[int], limit: int | None) -> list[int]:
    """Steps of missing checkpoints that train.save_total_limit did not delete."""
    return [
        step
        for step in sorted(before - after)
        if limit is None or sum(other > step for other in after) < limit
    ]


def differences_of_runs(
    output_dir: Path, reference: Path, excused_step: int | None = None
) -> list[str]:
    """Differences in final weights, the last checkpoint and the losses.

    Args:
        excused_step: step whose lines of metrics.jsonl may be missing.
    """
    differences = _tensor_differences(output_dir / "final", reference / "final", "model")
    newest = f"checkpoint-{max(checkpoint_steps(reference))}"
    differences += damage_of(output_dir / newest, reference / newest)
    wanted = _lines_by_step(reference)
    for step in _repeated(output_dir):
        differences.append(f"metrics.jsonl has step {step} twice")
    found = _lines_by_step(output_dir)
    for step, values in wanted.items():
        if step == excused_step:
            continue
        if found.get(step) != values:
            differences.append(f"metrics.jsonl: step {step} has {found.get(step)}, not {values}")
    return differences


def _tensor_differences(folder: Path, reference: Path, stem: str) -> list[str]:
    name = f"{folder.name}/{stem}"
    try:
        found, wanted = _tensors(folder, stem), _tensors(reference, stem)
    except Exception as error:  # safetensors raises several types for damaged files.
        return [f"{name} cannot be read: {error}"]
    if set(found) != set(wanted) or not wanted:
        return [f"{name} has other tensors: {sorted(set(found) ^ set(wanted))[:3]}"]
    differing = [key for key in sorted(wanted) if not _is_same(found[key], wanted[key])]
    if not differing:
        return []
    return [f"{name} differs in {len(differing)} tensors, such as {differing[0]}"]


def _tensors(folder: Path, stem: str) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob(f"{stem}*.safetensors")):
        tensors |= load_file(file)
    return tensors


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    same_kind = (one.dtype, one.shape) == (other.dtype, other.shape)
    return same_kind and one.tobytes() == other.tobytes()


def _lines_by_step(output_dir: Path) -> dict[int, dict[str, float]]:
    values: dict[int, dict[str, float]] = {}
    for line in metrics(output_dir):
        compared = {key: line[key] for key in _COMPARED_METRICS if key in line}
        values.setdefault(line["step"], {}).update(compared)
    return values


def _repeated(output_dir: Path) -> list[int]:
    steps = [line["step"] for line in metrics(output_dir) if "loss" in line]
    return sorted({step for step in steps if steps.count(step) > 1})
