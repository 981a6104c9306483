"""Damaged checkpoints are found before loading, by file; `auto` takes the newest good one."""

import json
import logging

import pytest

from paddle_vl.checkpoint import manifest
from paddle_vl.checkpoint.manifest import Manifest, check_weights, shared_out
from paddle_vl.train.checkpoint import model_folder
from paddle_vl.train.resume import checkpoint_to_resume, examine
from tests.single_card_tests.train.saved import (
    flip,
    on_ranks,
    run_config,
    save_checkpoint,
    without_manifest,
)


def resuming(output_dir, source="auto", **changes):
    values = run_config().model_dump()
    values["train"] |= {"output_dir": str(output_dir), "resume_from_checkpoint": str(source)}
    values["train"] |= changes
    return type(run_config()).model_validate(values)


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
