"""Energon's WebDataset files and what stands beside them.

Guarantees: a conversation in a member of its own takes the images of its sample, also as text or
under the names that dataset.yaml gives; splits name files; nothing that runs code is read.
"""

import json
import pickle

import pytest

from paddle_vl.data.corpus.energon import files_of_split
from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.data.corpus.corpus_files import opener, write_tar

TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
IMAGES = {"0.image.png": b"first", "0.image1.png": b"second"}


def described(folder, name, text):
    (folder / ".nv-meta").mkdir(parents=True, exist_ok=True)
    (folder / ".nv-meta" / name).write_text(text)


@pytest.mark.parametrize("value", [TALK, json.dumps(TALK), {"conversation": TALK, "id": "x"}])
def test_a_conversation_takes_the_images_of_its_sample(tmp_path, value):
    member = {"0.conversation.json": json.dumps(value).encode()}
    write_tar(tmp_path / "a.tar", IMAGES | member)
    row = opener()(tmp_path / "a.tar").read(0)
    whole = value if isinstance(value, dict) else {"messages": TALK}
    assert row == {**whole, "images": [b"first", b"second"]}


def test_fields_name_members(tmp_path):
    described(
        tmp_path,
        "dataset.yaml",
        "__module__: a\n__class__: ChatMLWebdataset\n"
        "field_map: {imgs: photo.bin, conversation: talk.json}",
    )
    (tmp_path / "shards").mkdir()
    members = {"0.talk.json": json.dumps(TALK).encode(), "0.photo.bin": b"photo"}
    write_tar(tmp_path / "shards" / "a.tar", members)
    row = opener()(tmp_path / "shards" / "a.tar").read(0)
    assert row == {"messages": TALK, "images": [b"photo"]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sample_loader: loader.py:load", "sample_loader.*needs Energon's Python"),
        ("field_map: {caption: 'json[text]'}", "is not read"),
        ("field_map: {answers: answers.json}", "is not read"),
        ("[1]", "a mapping is needed"),
        ("field_map: [image]", "field_map is .'image'.; a mapping is needed"),
        ("a: [", "is no YAML"),
        ("[" * 2000, "is no YAML"),
        ("a: 2026-99-99", "is no YAML"),
    ],
)
def test_descriptions_that_are_not_supported_are_refused(tmp_path, text, reason):
    described(tmp_path, "dataset.yaml", text)
    write_tar(tmp_path / "a.tar", {"0.json": b"{}"})
    with pytest.raises(RuntimeError, match=reason) as error:
        opener()(tmp_path / "a.tar")
    assert "dataset.yaml" in str(error.value)


def test_pickles_are_never_read(tmp_path):
    members = {"0.json": json.dumps(TALK).encode(), "0.jpgs": pickle.dumps([b"x"])}
    write_tar(tmp_path / "a.tar", members)
    with pytest.raises(BadSampleError, match="is a pickle"):
        opener()(tmp_path / "a.tar").read(0)


@pytest.mark.parametrize("member", [b'[], "x": 1', b"[1", b'"[1"', b"3"])
def test_broken_conversations_are_bad_samples(tmp_path, member):
    write_tar(tmp_path / "a.tar", {"0.conversation.json": member})
    with pytest.raises(BadSampleError, match="JSON"):
        opener()(tmp_path / "a.tar").read(0)


def test_splits_name_files(tmp_path):
    parts = "{train: ['s/{000..002}.tar', x.tar], val: ['v{1..0}.tar']}"
    split = f"{{split_parts: {parts}, exclude: [s/001.tar]}}"
    described(tmp_path, "split.yaml", split)
    train = [tmp_path / "s" / "000.tar", tmp_path / "s" / "002.tar", tmp_path / "x.tar"]
    assert files_of_split(tmp_path, "train") == train
    assert [file.name for file in files_of_split(tmp_path, "val")] == ["v1.tar", "v0.tar"]
    with pytest.raises(RuntimeError, match="no split 'test': choose one of train, val"):
        files_of_split(tmp_path, "test")
    # As megatron-energon 7.4.1 reads both: JSON where there is no YAML.
    described(tmp_path, "split.json", '{\n\t"split_parts": {"train": ["j.tar"]}}')
    assert files_of_split(tmp_path, "train") == train
    (tmp_path / ".nv-meta/split.yaml").unlink()
    assert files_of_split(tmp_path, "train") == [tmp_path / "j.tar"]
    described(tmp_path, "split.json", "[1]")
    with pytest.raises(RuntimeError, match=r"split\.json"):
        files_of_split(tmp_path, "train")


def test_without_splits_all_files_are_to_train_on(tmp_path):
    (tmp_path / ".nv-meta").mkdir()
    for name in ("b.tar", "a.tar", "._a.tar"):
        write_tar(tmp_path / name, {"0.json": b"{}"})
    assert files_of_split(tmp_path, "train") == [tmp_path / "a.tar", tmp_path / "b.tar"]
    with pytest.raises(RuntimeError, match="no split.yaml or split.json.*'val': write one"):
        files_of_split(tmp_path, "val")
    described(tmp_path, "split_2.yaml", "{split_parts: {train: [a.tar]}}")
    with pytest.raises(RuntimeError, match=r"rename split_2\.yaml"):
        files_of_split(tmp_path, "train")


@pytest.mark.parametrize(
    ("split", "reason"),
    [
        ("{split_parts: {train: ['{0..999999999}']}}", "names more files"),
        ("{split_parts: {train: ['" + "{0..99}" * 20 + "']}}", "names more files"),
        ("{split_parts: {train: ['../a.tar']}}", "is no file of"),
        ("{split_parts: {train: [/etc/a.tar]}}", "is no file of"),
    ],
)
def test_splits_that_name_too_much_or_lead_out_are_refused(tmp_path, split, reason):
    described(tmp_path, "split.yaml", split)
    with pytest.raises(RuntimeError, match=f"split.yaml.*{reason}"):
        files_of_split(tmp_path, "train")
