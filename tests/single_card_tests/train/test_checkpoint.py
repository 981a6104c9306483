"""Checkpoint folders, without a model.

Guarantees: a save that is interrupted at any point leaves the earlier checkpoint complete and
nothing under the new name; whenever a process ends that replaces one, the next start finds the old
one or the new one, complete; leftovers are removed; arrays are read back unchanged; resume finds
the right checkpoint and refuses changed settings.
"""

import random
import shutil
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_vl.families.vlm.settings import VLRun
from paddle_vl.train import checkpoint as checkpoints
from paddle_vl.train.resume import changed_settings, checkpoint_to_resume, examine
from paddle_vl.train.saving.checkpoint_writer import CheckpointWriter
from paddle_vl.train.schedule import seed_step
from tests.single_card_tests.train.saved import save_checkpoint, settings


def make_config(output_dir, **changes) -> VLRun:
    values = {
        "model": {"config": {"text_config": {"hidden_size": 8, "vocab_size": 64}}},
        "data": {"train": ["t.jsonl"], "processor": "p"},
        "train": {"output_dir": str(output_dir), "max_steps": 10, "resume_from_checkpoint": "auto"},
    }
    for name, value in changes.items():
        section, _, leaf = name.partition("__")
        values.setdefault(section, {})[leaf] = value
    return VLRun.model_validate(values)


def save(output_dir, step):
    return save_checkpoint(output_dir, step, make_config("out"))


def names(output_dir):
    return sorted(path.name for path in output_dir.iterdir())


def test_interrupted_save_leaves_the_earlier_checkpoint_only(tmp_path):
    save(tmp_path, 2)

    def fail_midway(folder, write):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path, settings()) as writer:
        writer.save(4, fail_midway)
    assert [step for step, _ in checkpoints.complete_checkpoints(tmp_path)] == [2]
    assert not (tmp_path / "checkpoint-4").exists()
    checkpoints.finish_saves(tmp_path)
    assert names(tmp_path) == ["checkpoint-2"]


def test_interrupted_removal_leaves_no_half_empty_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 2)
    save(tmp_path, 4)

    def remove_part(folder):
        (folder / "config.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "rmtree", remove_part)
        with pytest.raises(KeyboardInterrupt):
            shutil.rmtree(checkpoints.set_aside(tmp_path / "checkpoint-2"))
    assert not (tmp_path / "checkpoint-2").exists()
    checkpoints.finish_saves(tmp_path)
    assert names(tmp_path) == ["checkpoint-4"]


def test_random_numbers_depend_on_seed_and_step_only():
    def draw(seed: int, step: int):
        seed_step(seed, step)
        return random.random(), np.random.normal(), paddle.randn([2]).tolist()

    first = draw(3, 7)
    assert all(one != other for one, other in zip(first, draw(3, 8), strict=True))
    assert all(one != other for one, other in zip(first, draw(4, 7), strict=True))
    assert draw(3, 7) == first


def test_auto_takes_the_newest_complete_checkpoint(tmp_path):
    config = make_config(tmp_path)
    assert checkpoint_to_resume(config) is None
    save(tmp_path, 9)
    newest = save(tmp_path, 10)
    (save(tmp_path, 11) / "optimizer.safetensors").unlink()
    assert checkpoint_to_resume(config) == newest
    assert checkpoint_to_resume(make_config(tmp_path, train__resume_from_checkpoint="none")) is None


def test_named_checkpoint_must_be_complete_and_the_newest_of_its_folder(tmp_path):
    older, newer = save(tmp_path, 2), save(tmp_path, 4)

    def resume_from(path, output_dir=tmp_path):
        return checkpoint_to_resume(
            make_config(output_dir, train__resume_from_checkpoint=str(path))
        )

    assert resume_from(newer) == newer
    assert resume_from(older, tmp_path / "other") == older
    with pytest.raises(RuntimeError, match=r"also holds checkpoint-4, which this run"):
        resume_from(older)
    shutil.rmtree(newer)
    assert resume_from(older) == older
    (older / checkpoints.STATE_FILE).unlink()
    with pytest.raises(RuntimeError, match="not a complete checkpoint: it has no trainer_state"):
        resume_from(older)


def test_allowed_changes_are_reported(tmp_path):
    saved = save(tmp_path, 2)
    changed = make_config("elsewhere", train__learning_rate=1e-3, logging__logging_steps=2)
    assert changed_settings(saved, make_config("out")) == []
    assert changed_settings(saved, changed) == [
        "train.learning_rate: 5e-05 -> 0.001",
        "logging.logging_steps: 10 -> 2",
    ]


def test_forbidden_changes_are_refused_with_old_and_new_value(tmp_path):
    saved = save(tmp_path, 2)
    changed = make_config(
        "out",
        model__config={"text_config": {"hidden_size": 16, "vocab_size": 64}},
        train__seed=7,
        train__per_device_train_batch_size=4,
        train__learning_rate=1.0,
    )
    with pytest.raises(ValueError, match="cannot be continued") as caught:
        changed_settings(saved, changed)
    message = str(caught.value)
    for part in (
        "model.config.text_config.hidden_size: 8 -> 16",
        "train.seed: 42 -> 7",
        "(train.per_device_train_batch_size x parallel.dp_degree x sharding_degree / "
        "cp_degree): 8 -> 4",
    ):
        assert part in message
    assert "learning_rate" not in message


@pytest.mark.parametrize("number", range(2))
def test_a_kill_while_one_is_replaced_costs_nothing(tmp_path, monkeypatch, number):
    """A process that ends at any rename of the replacement."""
    older = save_checkpoint(tmp_path, 2)
    (older / "old").write_text("x")
    plain, renamed = Path.rename, []

    def rename(path, target):
        if Path(target).parent == tmp_path:
            if len(renamed) == number:
                raise KeyboardInterrupt
            renamed.append(target)
        return plain(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(RuntimeError, match="checkpoint-2 could not be written"):
            save_checkpoint(tmp_path, 2)
    assert len(renamed) == number
    checkpoints.finish_saves(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    assert not examine(older)
    assert (older / "old").exists() == (number == 0)
