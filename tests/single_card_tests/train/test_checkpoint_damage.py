"""Damaged checkpoints.

Guarantees: damage of any kind to any file is found before loading, whichever rank reads the file,
and the file is named; `auto` takes the newest checkpoint without damage, logs which it skipped and
why, and does not start a new run if all are damaged; weights are compared with their manifest when
loaded, text files are not.
"""

import json
import logging

import pytest

from paddle_vl.checkpoint import manifest
from paddle_vl.checkpoint.manifest import FileSum, Manifest, check_weights, shared_out
from paddle_vl.train.checkpoint import model_folder
from paddle_vl.train.resume import checkpoint_to_resume, examine
from tests.single_card_tests.train.saved import on_ranks, run_config, save_checkpoint


def resuming(output_dir, source="auto", **changes):
    values = run_config().model_dump()
    values["train"] |= {"output_dir": str(output_dir), "resume_from_checkpoint": str(source)}
    values["train"] |= changes
    return type(run_config()).model_validate(values)


def flip(path, place=-1):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


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
    (problem,) = examine(folder)
    assert "manifest.json is damaged" in problem


@pytest.mark.parametrize("name", ["/etc/passwd", "../other", "a/../../b", ""])
def test_a_manifest_names_files_of_its_folder_only(tmp_path, name):
    folder = save_checkpoint(tmp_path, 2)
    values = json.loads((folder / "manifest.json").read_text())
    values["files"][name] = {"size": 1, "xxh3_128": "0"}
    (folder / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(RuntimeError, match="lies outside the folder"):
        Manifest.read(folder)


@pytest.mark.parametrize("name", ["model-\0-of-1.safetensors", "model-\ud800-of-1.safetensors"])
def test_a_manifest_with_a_name_that_no_file_has_is_damage(tmp_path, name):
    folder = save_checkpoint(tmp_path, 2)
    values = json.loads((folder / "manifest.json").read_text())
    values["files"][name] = {"size": 1, "xxh3_128": "0"}
    (folder / "manifest.json").write_text(json.dumps(values))
    (problem,) = examine(folder)
    assert "has a name that no file can have" in problem
    with pytest.raises(RuntimeError, match="manifest.json is damaged"):
        check_weights(folder)


def test_other_files_in_the_folder_do_not_matter(tmp_path):
    folder = save_checkpoint(tmp_path, 2)
    (folder / "README.md").write_text("a model card")
    assert not examine(folder)


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
    assert "optimizer.safetensors does not have the checksum" in verdicts[0][0]
    assert sorted(name for names in read for name in names) == sorted(Manifest.read(folder).files)
    assert all(read)


def test_shares_are_of_about_as_many_bytes():
    files = {f"{number}": FileSum(size, "") for number, size in enumerate((9, 5, 4, 4, 3, 1))}
    shares = [shared_out(files, rank, 3) for rank in range(3)]
    assert [sum(file.size for file in share.values()) for share in shares] == [9, 9, 8]


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
    (problem,) = examine(folder)
    assert problem.startswith("model.safetensors does not have the checksum")
    text = json.loads((folder / manifest.MANIFEST_FILE).read_text())
    del text["files"]["model.safetensors"]["pieces"][1]
    (folder / manifest.MANIFEST_FILE).write_text(json.dumps(text))
    with pytest.raises(RuntimeError, match="of model.safetensors bytes 16 to 32 are of no piece"):
        Manifest.read(folder)


@pytest.mark.parametrize(("number", "is_read"), [(1, True), (2, True), (3, False)])
def test_manifests_of_before_are_read_and_later_ones_refused(tmp_path, number, is_read):
    folder = save_checkpoint(tmp_path, 2)
    values = json.loads((folder / "manifest.json").read_text())
    assert values["format"] == 2
    (folder / "manifest.json").write_text(json.dumps(values | {"format": number}))
    problems = examine(folder)
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
