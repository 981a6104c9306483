"""Checkpoint folders, without a model.

Interrupted saves; which one is resumed; changed settings; damage, which is found before loading, by
file, and passed over by `auto`.
"""

import json
import logging
import random
import shutil
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_vl.checkpoint import manifest
from paddle_vl.checkpoint.manifest import Manifest, check_weights, shared_out
from paddle_vl.families.vlm.settings import VLRun
from paddle_vl.train import checkpoint as checkpoints
from paddle_vl.train.checkpoint import model_folder
from paddle_vl.train.resume import changed_settings, checkpoint_to_resume, examine
from paddle_vl.train.saving.checkpoint_writer import CheckpointWriter
from paddle_vl.train.schedule import seed_step
from tests.single_card_tests.train.saved import (
    flip,
    on_ranks,
    save_checkpoint,
    settings,
    without_manifest,
)


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


def resuming(output_dir, source="auto", **changes) -> VLRun:
    given = {f"train__{name}": value for name, value in changes.items()}
    return make_config(output_dir, train__resume_from_checkpoint=str(source), **given)


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
    newest = [save(tmp_path, step) for step in (9, 10)][1]
    (save(tmp_path, 11) / "optimizer.safetensors").unlink()
    assert checkpoint_to_resume(config) == newest
    assert checkpoint_to_resume(resuming(tmp_path, "none")) is None


def test_named_checkpoint_must_be_complete_and_the_newest_of_its_folder(tmp_path):
    older, newer = save(tmp_path, 2), save(tmp_path, 4)

    def resume_from(path, output_dir=tmp_path):
        return checkpoint_to_resume(resuming(output_dir, path))

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
    assert not examine(older).problems
    assert (older / "old").exists() == (number == 0)


DAMAGE = {
    "deleted": lambda path: path.unlink(),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "flipped": flip,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
}
FILES = [
    "model.safetensors", "optimizer.safetensors", "trainer_state.json", "config.yaml",
    "config.json", "parts/tokenizer.json", "manifest.json",
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, name) for kind in ("deleted", "flipped") for name in FILES),
        *((kind, "model.safetensors") for kind in ("truncated", "empty", "longer")),
    ],
)
def test_auto_passes_over_every_damage_and_says_what_it_is(tmp_path, caplog, kind, name):
    good = save_checkpoint(tmp_path, 2)
    damaged = save_checkpoint(tmp_path, 4)
    if (kind, name) == ("flipped", "manifest.json"):
        # Inside a checksum; elsewhere the file would not be JSON any more.
        file = damaged / name
        file.write_text(file.read_text().replace('"xxh3_128": "', '"xxh3_128": "0', 1))
    else:
        DAMAGE[kind](damaged / name)
    with caplog.at_level(logging.WARNING, "paddle_vl"):
        assert checkpoint_to_resume(resuming(tmp_path)) == good
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("passed over checkpoint-4: ")
    if name != "manifest.json" or kind == "deleted":
        assert name in line
    if kind == "empty" and name.endswith("safetensors"):
        assert f"{name} is empty" in line
    with pytest.raises(RuntimeError, match="checkpoint-4 is (damaged: |not a complete ch)"):
        checkpoint_to_resume(resuming(tmp_path, damaged))


@pytest.mark.parametrize(
    "text", ["[]", "{", "null", '{"format": 1}', '{"format": 2, "files": {}}', "\udcff", "[" * 9999]
)
def test_a_manifest_that_is_none_is_damage(tmp_path, text):
    folder = save_checkpoint(tmp_path, 2)
    (folder / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    (problem,) = examine(folder).problems
    assert "manifest.json is damaged" in problem


def edited(folder, change):
    """The folder, with its manifest changed."""
    file = folder / manifest.MANIFEST_FILE
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("name", ["/etc/passwd", "../other", "a/../../b", ""])
def test_a_manifest_names_files_of_its_folder_only(tmp_path, name):
    entry = {name: {"size": 1, "xxh3_128": "0"}}
    folder = edited(save_checkpoint(tmp_path, 2), lambda values: values["files"].update(entry))
    with pytest.raises(RuntimeError, match="lies outside the folder"):
        Manifest.read(folder)


@pytest.mark.parametrize("name", ["model-\0-of-1.safetensors", "model-\ud800-of-1.safetensors"])
def test_a_manifest_with_a_name_that_no_file_has_is_damage(tmp_path, name):
    entry = {name: {"size": 1, "xxh3_128": "0"}}
    folder = edited(save_checkpoint(tmp_path, 2), lambda values: values["files"].update(entry))
    (problem,) = examine(folder).problems
    assert "has a name that no file can have" in problem
    with pytest.raises(RuntimeError, match="manifest.json is damaged"):
        check_weights(folder)


def test_auto_begins_nothing_anew_where_no_checkpoint_can_be_used(tmp_path):
    (save_checkpoint(tmp_path, 2) / "optimizer.safetensors").unlink()
    flip(save_checkpoint(tmp_path, 4) / "model.safetensors")
    with pytest.raises(RuntimeError, match="none of the checkpoints in") as caught:
        checkpoint_to_resume(resuming(tmp_path))
    for part in (
        "checkpoint-2: it has no optimizer.safetensors",
        "checkpoint-4: model.safetensors does not have the checksum",
    ):
        assert part in str(caught.value)


def test_without_verification_sizes_still_count(tmp_path):
    good, flipped = save_checkpoint(tmp_path, 2), save_checkpoint(tmp_path, 4)
    flip(flipped / "model.safetensors")
    assert checkpoint_to_resume(resuming(tmp_path, verify_checkpoint=False)) == flipped
    DAMAGE["truncated"](flipped / "model.safetensors")
    assert checkpoint_to_resume(resuming(tmp_path, verify_checkpoint=False)) == good


def test_a_checkpoint_of_an_earlier_version_is_used_and_said_to_be_unverified(tmp_path, caplog):
    older, newer = (without_manifest(save_checkpoint(tmp_path, step)) for step in (2, 4))
    assert checkpoint_to_resume(resuming(tmp_path)) == newer
    assert "checkpoint-4 is not verified: it has no manifest.json" in caplog.text
    DAMAGE["truncated"](newer / "optimizer.safetensors")
    assert checkpoint_to_resume(resuming(tmp_path)) == older


def test_ranks_share_the_reading_and_come_to_one_verdict(tmp_path, monkeypatch):
    folder = save_checkpoint(tmp_path, 2)
    flip(folder / "optimizer.safetensors")
    read = []
    plain = examine.__globals__["damaged_files"]

    def damaged_files(folder, files, *arguments):
        read.append(sorted(files))
        return plain(folder, files, *arguments)

    monkeypatch.setitem(examine.__globals__, "damaged_files", damaged_files)

    verdicts = on_ranks(3, lambda processes: examine(folder, True, processes))
    assert verdicts[0] == verdicts[1] == verdicts[2]
    assert "optimizer.safetensors does not have the checksum" in verdicts[0].problems[0]
    assert sorted(name for names in read for name in names) == sorted(Manifest.read(folder).files)
    assert all(read)


def test_a_file_of_pieces_is_verified_piece_by_piece_on_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "PIECE_BYTES", 16)
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 8)
    folder = save_checkpoint(tmp_path, 2)
    whole = Manifest.read(folder).files["model.safetensors"]
    assert sum(piece.length for piece in whole.pieces) == whole.size
    assert {piece.length for piece in whole.pieces[:-1]} == {16}
    shares = [shared_out({"model.safetensors": whole}, rank, 3) for rank in range(3)]
    pieces = [piece for share in shares for piece in share["model.safetensors"].pieces]
    assert sorted(pieces) == list(whole.pieces)
    flip(folder / "model.safetensors")
    found = [manifest.damaged_files(folder, share) for share in shares]
    assert sum(map(len, found)) == 1
    (problem,) = examine(folder).problems
    assert problem.startswith("model.safetensors does not have the checksum")
    edited(folder, lambda values: values["files"]["model.safetensors"]["pieces"].pop(1))
    with pytest.raises(RuntimeError, match="of model.safetensors bytes 16 to 32 are of no piece"):
        Manifest.read(folder)


@pytest.mark.parametrize(("number", "is_read"), [(1, True), (2, True), (3, False)])
def test_manifests_of_before_are_read_and_later_ones_refused(tmp_path, number, is_read):
    folder = edited(save_checkpoint(tmp_path, 2), lambda values: values.update(format=number))
    # Other files in the folder do not matter.
    (folder / "README.md").write_text("a model card")
    problems = examine(folder).problems
    assert not problems if is_read else "format 3" in problems[0]


def test_damaged_weights_are_refused_by_name_and_edited_texts_are_not(tmp_path):
    folder = save_checkpoint(tmp_path, 2)
    (folder / "config.json").write_text('{"edited": true}')
    flip(folder / "optimizer.safetensors")
    assert model_folder(folder) == folder
    flip(folder / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"is damaged: model\.safetensors does not have the che"):
        model_folder(folder)
    (folder / "manifest.json").unlink()
    assert model_folder(folder) == folder
