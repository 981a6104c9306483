"""Conversations from tables and archives.

Guarantees: images as bytes, `{bytes, path}` and members of an archive give what their files give; a
plain path of another file than JSONL is a source of conversations where sources are read, and is
refused with the remedy elsewhere; wrong rows are refused when the file is opened, without raw
bytes; keys that are not read are named once per file, also by several workers.
"""

import json
import logging
import os

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from paddle_vl.config.data_sources import SourceConfig
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.worker_pool import results_in_order
from paddle_vl.families.vlm.inputs.corpus import Corpus
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset
from paddle_vl.families.vlm.settings import VLDataConfig
from tests.single_card_tests.data.corpus.corpus_files import lines, picture, write_tar

PICTURES = [picture(1), picture(2)]


def opened(processor, entry, **settings) -> Corpus:
    data = VLDataConfig.model_validate(settings)
    return Corpus.opened([entry], data, processor, seed=1)


def chat(content) -> list[dict]:
    return [{"role": "user", "content": content}, {"role": "assistant", "content": "blue"}]


def part(source) -> dict:
    return {"type": "image", "image": source}


TAGS, TEXT = "<image>red<image>", {"type": "text", "text": "red"}


def table(folder, name, **columns) -> str:
    parquet.write_table(pa.table(columns), folder / name)
    return str(folder / name)


def structs(folder) -> str:
    images = [{"bytes": picture, "path": "x.png"} for picture in PICTURES]
    return table(folder, "s.parquet", messages=[chat(TAGS)], images=[images])


def paths(folder) -> str:
    images = [{"bytes": None, "path": f"{number}.png"} for number in range(2)]
    return table(folder, "p.parquet", messages=[chat(TAGS)], images=[images])


def parts(folder) -> str:
    shown = [
        {"type": "image", "image": {"bytes": PICTURES[0], "path": None}, "text": None},
        {"type": "text", "image": None, "text": "red"},
        {"type": "image", "image": {"bytes": PICTURES[1], "path": None}, "text": None},
    ]
    answer = [{"type": "text", "image": None, "text": "blue"}]
    messages = [{"role": "user", "content": shown}, {"role": "assistant", "content": answer}]
    return table(folder, "c.parquet", messages=[messages])


def archive(folder, record) -> str:
    members = {
        "1.json": json.dumps(record).encode(),
        "1.a.png": PICTURES[0],
        "1.b.png": PICTURES[1],
    }
    write_tar(folder / "t.tar", members)
    return str(folder / "t.tar")


WRITTEN = {
    "structs": structs,
    "structs without bytes": paths,
    "parts of a table": parts,
    "members": lambda folder: archive(
        folder, {"messages": chat(TAGS), "images": ["a.png", "1.b.png"]}
    ),
    "members that nothing names": lambda folder: archive(folder, {"messages": chat(TAGS)}),
    "members in parts": lambda folder: archive(
        folder, {"messages": chat([part("a.png"), TEXT, part("b.png")])}
    ),
}


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("is_plain_path", [True, False])
def test_images_of_a_conversation_are_those_of_its_files(
    tmp_path, processor, written, is_plain_path
):
    for number, image in enumerate(PICTURES):
        (tmp_path / f"{number}.png").write_bytes(image)
    record = {"messages": chat(TAGS), "images": ["0.png", "1.png"]}
    (tmp_path / "j.jsonl").write_bytes(lines([record]))
    wanted = MessagesDataset([tmp_path / "j.jsonl"], processor)[0]
    path = WRITTEN[written](tmp_path)
    entry = path if is_plain_path else SourceConfig(path=path, format="messages")
    sample = opened(processor, entry).samples()[0]
    assert sample.keys() == wanted.keys()
    for key, array in wanted.items():
        np.testing.assert_array_equal(sample[key], array, err_msg=key)


def test_a_column_of_one_image_is_named_by_columns(tmp_path, processor):
    file = table(tmp_path, "o.parquet", chat=[chat("<image>red")],
                 image=[{"bytes": PICTURES[0], "path": None}])  # fmt: skip
    source = SourceConfig(path=file, columns={"messages": "chat", "images": "image"})
    assert opened(processor, source).samples()[0]["image_grid_thw"].shape == (1, 3)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"images": [b"\x89PNG no picture"]}, "image 1: the file cannot be decoded"),
        ({"images": [[PICTURES[0], PICTURES[1]]]}, "1 image place.* but 2 entries"),
        ({"images": [[{"colour": "red"}]]}, "a source has the unknown key .colour."),
        ({"images": [[[PICTURES[0]]]]}, "<.* bytes>.* is not a path"),
        ({"videos": [[PICTURES[0]]], "images": [[PICTURES[0]]]}, "0 video place"),
        ({"messages": [PICTURES[0]]}, "'messages' must be a list"),
        ({"messages": [[{"role": "user", "content": PICTURES[0]}]]}, "content of type bytes"),
        ({"messages": [chat([{"type": PICTURES[0]}])[:1]]}, "has the part .*<.* bytes>"),
        ({"label": [PICTURES[0]], "images": [[PICTURES[0]]]}, "'label' is .*<.* bytes>"),
    ],
)
def test_wrong_rows_are_refused_when_opened_and_without_their_bytes(
    tmp_path, processor, columns, reason
):
    columns = {"messages": [chat("<image>red")], **columns}
    file = table(tmp_path, "w.parquet", **columns)
    with pytest.raises(BadSampleError, match=reason) as error:
        opened(processor, file)
    assert str(error.value).startswith(f"{file}:row 1: ")
    assert "\\x" not in str(error.value)
    assert len(str(error.value)) < 500 + len(file)
    # Left out one by one instead.
    assert len(opened(processor, file, on_bad_sample="skip")) == 1


def test_other_files_than_jsonl_are_refused_where_lines_are_read(processor):
    with pytest.raises(ValueError, match=r"x\.parquet is no JSONL file, .*write one JSON object"):
        MessagesDataset(["x.parquet"], processor)


def test_keys_that_are_not_read_are_named_once(tmp_path, processor, caplog):
    row = {"messages": chat("red"), "images_path": ["a.png"], "id": 7}
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_bytes(lines([row, {**row, "sistem": "x", "videos": None}]))
    wanted = [
        f"{file}: records have the key(s) 'images_path' (is 'images' meant?)" for file in files
    ]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            MessagesDataset(files, processor)
    assert [each.split(", ")[0] for each in caplog.messages] == wanted
    assert all("'sistem' (is 'system' meant?)" in each for each in caplog.messages)
    assert not any("'id'" in each for each in caplog.messages)
    caplog.clear()
    other = tmp_path / "c.jsonl"
    other.write_bytes(lines([row] * 4))
    with caplog.at_level(logging.WARNING):
        samples = opened(processor, SourceConfig(path=str(other))).samples()
        assert len([samples[number] for number in range(4)]) == 4
    (said,) = caplog.messages
    assert said.startswith(f"{other}: records have the key(s) 'images_path'")


def test_workers_name_unread_keys_of_a_file_once_between_them(tmp_path, processor, caplog):
    row = {"messages": chat("red"), "images_path": ["a.png"]}
    file = tmp_path / "d.jsonl"
    file.write_bytes(lines([row] * 8))
    samples = opened(processor, SourceConfig(path=str(file)), on_bad_sample="skip").samples()
    with caplog.at_level(logging.WARNING):
        found = results_in_order(_with_process, samples, [(i,) for i in range(8)], 2)
        processes = {process for process, _ in found}
    assert len(processes) == 2
    (said,) = caplog.messages
    assert said.startswith(f"{file}: records have the key(s) 'images_path'")


def _with_process(samples, number: int) -> tuple[int, int]:
    return os.getpid(), len(samples[number]["input_ids"])
