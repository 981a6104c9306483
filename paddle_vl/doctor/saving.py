"""A run that is saved and resumed ends with the bits of one that was not interrupted."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import paddle

from paddle_vl.checkpoint.safetensors_io import read_checkpoint_headers
from paddle_vl.config.load import load_run_config
from paddle_vl.doctor.check import Check, Machine, Result, ok, wrong
from paddle_vl.testing.tiny_run import write_tiny_run
from paddle_vl.train.build import build_trainer

_STEPS, _SAVED = 4, 2
# Without these a GPU adds in an order that changes from run to run.
_DETERMINISTIC = ("FLAGS_cudnn_deterministic", "FLAGS_embedding_deterministic")


def checks(machine: Machine) -> list[Check]:
    return [
        Check("saving.resume", "a resumed run equals an uninterrupted one", _resume, limit_s=120)
    ]


def _resume(machine: Machine) -> Result:
    folder = machine.folder / "resume"
    run = write_tiny_run(folder, _STEPS)
    whole, resumed = folder / "whole", folder / "resumed"
    with _deterministic():
        for output in (whole, resumed):
            if output == resumed:
                name = f"checkpoint-{_SAVED}"
                shutil.copytree(whole / name, resumed / name)
            settings = [
                f"train.output_dir={output}",
                f"train.save_steps={_SAVED}",
                "train.resume_from_checkpoint=auto",
            ]
            build_trainer(load_run_config(run, settings)).run()
    name = f"checkpoint-{_STEPS}"
    number, differing = compared_bits(resumed / name, whole / name)
    if differing:
        return wrong(
            f"{len(differing)} of {number} tensors differ after a resume, first {differing[0]}",
            "a checkpoint does not hold the whole state, or kernels add in a changing order: run "
            "twice to tell these apart, and report it",
            differing=differing[:20],
        )
    return ok(f"{number} tensors of model and optimizer are equal to the bit", tensors=number)


def compared_bits(found: Path, wanted: Path) -> tuple[int, list[str]]:
    """Number of tensors of two checkpoints, and the names of those that are not the same bits."""
    own, other = (
        {
            **read_checkpoint_headers(folder, "model"),
            **read_checkpoint_headers(folder, "optimizer"),
        }
        for folder in (found, wanted)
    )
    differing = [
        name
        for name in sorted({*own, *other})
        if name not in own
        or name not in other
        or not np.array_equal(own[name].read(), other[name].read(), equal_nan=True)
    ]
    return len(other), differing


@contextmanager
def _deterministic() -> Iterator[None]:
    before = {}
    for name in _DETERMINISTIC:
        try:
            before.update(paddle.get_flags(name))
        except ValueError:
            # A flag of GPU wheels only.
            continue
    paddle.set_flags(dict.fromkeys(before, 1))
    try:
        yield
    finally:
        paddle.set_flags(before)
