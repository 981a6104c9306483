"""Data files, indexes and copies that change between and during runs.

Guarantees: an edit that keeps size and time of a file, where a start samples it, is refused by name
when a run resumes; a damaged index is made again with one line in the log, and blames no document;
indexes and checkpoints of earlier versions are used as far as they go.
"""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from paddle_vl.config.data_sources import SourceConfig
from paddle_vl.data.corpus.token_files import TokenFileWriter
from paddle_vl.families.vlm.inputs.collate import VLCollator
from paddle_vl.families.vlm.inputs.corpus import Corpus
from paddle_vl.families.vlm.settings import VLDataConfig
from tests.single_card_tests.data.corpus.corpus_files import lines, opener, picture, write_tar

Write = Callable[[Path, str, int], Path]


def texts(word: str, count: int) -> list[str]:
    return [f"red {word if row == count // 2 else 'blue'} {row:07}" for row in range(count)]


def write_jsonl(folder: Path, word: str, count: int) -> Path:
    (folder / "a.jsonl").write_bytes(lines({"text": text} for text in texts(word, count)))
    return folder / "a.jsonl"


def write_gzip(folder: Path, word: str, count: int) -> Path:
    # Without compression the file keeps its size.
    raw = write_jsonl(folder, word, count)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(raw.read_bytes(), 0, mtime=0))
    raw.unlink()
    return folder / "a.jsonl.gz"


def write_webdataset(folder: Path, word: str, count: int) -> Path:
    members = {}
    for row in range(count):
        text = f"red {word if row == count // 2 else 'blue'}"
        members |= {f"{row:05}.txt": text.encode(), f"{row:05}.png": picture(row % 3)}
    write_tar(folder / "a.tar", members)
    return folder / "a.tar"


def write_parquet(folder: Path, word: str, count: int) -> Path:
    parquet.write_table(
        pa.table({"text": texts(word, count)}), folder / "a.parquet",
        compression="none", use_dictionary=False, write_statistics=False, row_group_size=500,
    )  # fmt: skip
    return folder / "a.parquet"


def write_tokens(folder: Path, word: str, count: int) -> Path:
    for path in folder.glob("a.*"):
        path.unlink()
    ids = np.arange(10 * count) % 200
    ids[5 * count] = len(word) + ord(word[0])
    with TokenFileWriter(folder / "a", 300) as writer:
        writer.add(ids, np.full(count, 10))
    return folder / "a.bin"


def write_mask(folder: Path, word: str, count: int) -> Path:
    if not (folder / "a.bin").is_file():
        write_tokens(folder, "blue", count)
    mask = np.ones(10 * count, dtype=np.uint8)
    mask[5 * count] = word == "blue"
    (folder / "a.lsm").write_bytes(mask.tobytes())
    return folder / "a.lsm"


WRITERS = [write_jsonl, write_gzip, write_webdataset, write_parquet, write_tokens, write_mask]
KINDS = pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__[6:])


def edit(write: Write, file: Path, count: int) -> None:
    """Write the file again with another word, of the same size and time."""
    before = file.stat()
    write(file.parent, "lime", count)
    os.utime(file, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size


def data_of(file: Path) -> Path:
    """What a source names: of token files the index."""
    return file.with_suffix(".idx") if file.suffix in (".bin", ".lsm") else file


def loader(processor, file: Path, **settings):
    kind = "image_text" if file.suffix == ".tar" else "text"
    source = SourceConfig(path=str(data_of(file)), format=kind, name="web")
    data = VLDataConfig.model_validate({"max_length": 64, **settings})
    collator = VLCollator(
        processor.pad_token_id, processor.image_token_id, processor.video_token_id
    )
    return Corpus.opened([source], data, processor, seed=1).train_loader(collator, 1, 0, 1)


@KINDS
def test_an_edit_that_keeps_size_and_time_is_refused_on_resume(tmp_path, processor, write):
    file = write(tmp_path, "blue", 30)
    before = loader(processor, file)
    next(before)
    state = json.loads(json.dumps(before.state_dict()))
    loader(processor, file).load_state_dict(state)
    edit(write, file, 30)
    message = "cannot continue in the data: the data files of source web were changed"
    with pytest.raises(ValueError, match=message):
        loader(processor, file).load_state_dict(state)
    # So does one that changes the time.
    os.utime(file, ns=(1, 1))
    with pytest.raises(ValueError, match=message):
        loader(processor, file).load_state_dict(state)
    # A copy of the data is the same data.
    write(tmp_path, "blue", 30)
    os.utime(file, ns=(2, 2))
    loader(processor, file).load_state_dict(state)


@pytest.mark.parametrize("write", [write_jsonl, write_gzip, write_webdataset])
def test_a_damaged_index_is_made_again_with_one_line(tmp_path, caplog, write):
    file = write(tmp_path, "blue", 30)
    shard = opener()(data_of(file))
    rows = [shard.read(row) for row in range(shard.count)]
    for index in (tmp_path / ".paddle_vl").glob("*.index"):
        whole = index.read_bytes()
        flipped = [bytes(b ^ (i == at) for i, b in enumerate(whole)) for at in range(len(whole))]
        cut = [whole[:length] for length in range(0, len(whole), 7)]
        for damaged in [*flipped[::5], *cut, whole + b"\0", bytes(len(whole))]:
            index.write_bytes(damaged)
            caplog.clear()
            again = opener()(data_of(file))
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert f"{index} is damaged" in caplog.text
            assert index.read_bytes() == whole
        assert again == shard
        np.testing.assert_equal([again.read(row) for row in range(again.count)], rows)


def test_an_index_that_is_damaged_while_in_use_blames_no_document(tmp_path, processor):
    file = write_jsonl(tmp_path, "blue", 30)
    samples = loader(processor, file, on_bad_sample="skip")
    index = tmp_path / ".paddle_vl" / "a.jsonl.index"
    os.truncate(index, 100)
    with pytest.raises(RuntimeError, match=r"a\.jsonl\.index was damaged while in use: start"):
        next(samples)
    assert not samples.skipped


def test_the_copy_of_an_edited_file_is_made_again(tmp_path):
    """And the one of the earlier state is removed."""
    file = write_gzip(tmp_path, "blue", 30)
    assert "blue" in opener()(file).read(15)["text"]
    edit(write_gzip, file, 30)
    assert "lime" in opener()(file).read(15)["text"]
    assert len([*(tmp_path / ".paddle_vl").glob("*.copy")]) == 1


def test_an_index_of_an_earlier_version_is_made_again(tmp_path):
    file = write_jsonl(tmp_path, "blue", 30)
    wanted = opener()(file)
    index = tmp_path / ".paddle_vl" / "a.jsonl.index"
    index.write_bytes(b"PVLIDX01" + bytes(56) + index.read_bytes()[72:320])
    assert opener()(file) == wanted


def test_a_checkpoint_of_an_earlier_version_continues(tmp_path, processor):
    """It has sums of blocks, or no more than hashes of the contents."""
    file = write_webdataset(tmp_path, "blue", 30)
    before = loader(processor, file)
    next(before)
    state = before.state_dict()
    stream = {name: value for name, value in state["stream"].items() if name != "samples"}
    for earlier in (stream, stream | {"contents": {"web": 1}}):
        loader(processor, file).load_state_dict({**state, "stream": earlier})
    write_webdataset(tmp_path, "blue", 29)
    with pytest.raises(ValueError, match="the data files of source web were changed"):
        loader(processor, file).load_state_dict({**state, "stream": stream})


def test_a_file_that_grows_is_read_as_it_was(tmp_path):
    file = write_jsonl(tmp_path, "blue", 30)
    shard = opener()(file)
    with file.open("ab") as more:
        more.write(b'{"text": "more"}\n')
    assert shard.read(29) == {"text": "red blue 0000029"}
    assert opener()(file).count == 31


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(step="x"), "position is damaged"),
        (lambda state: state.pop("step"), "position is damaged"),
        (lambda state: state.update(step=2), "position is damaged"),
        (lambda state: state.update(lanes=[]), "position is damaged"),
        (lambda state: state["lanes"].update({"0": []}), "position is damaged"),
        (lambda state: state.update(stream=None), "seed was None and is 1"),
    ],
)
def test_a_damaged_position_is_refused(tmp_path, processor, change, message):
    file = write_jsonl(tmp_path, "blue", 30)
    batches = loader(processor, file)
    next(batches)
    state = json.loads(json.dumps(batches.state_dict()))
    change(state)
    with pytest.raises(ValueError, match=f"cannot continue in the data: .*{message}"):
        loader(processor, file).load_state_dict(state)


def test_a_damaged_record_of_the_tokenizer_is_named(tmp_path, processor):
    file = write_tokens(tmp_path, "blue", 3)
    (tmp_path / "a.json").write_bytes(b'{"tokenizer": "12')
    with pytest.raises(RuntimeError, match=r"a\.json, which names the tokenizer of a\.idx, is dam"):
        loader(processor, file)
