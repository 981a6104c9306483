"""Texts to memory-mapped token files.

Guarantees: `paddle-vl tokenize` writes the documents of its files in order, the same with any
number of processes; bad texts are named or counted; nothing is overwritten; a run with another
tokenizer refuses the files.
"""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from paddle_vl.cli.main import main
from paddle_vl.config.data_sources import SourceConfig
from paddle_vl.data.corpus import tokenize
from paddle_vl.families.vlm.inputs.corpus import Corpus
from paddle_vl.families.vlm.inputs.processor import Qwen3VLProcessor
from paddle_vl.families.vlm.settings import VLDataConfig
from paddle_vl.testing.tiny_run import write_processor
from tests.single_card_tests.data.corpus.corpus_files import lines, opener

ROWS = [{"text": ["red green", "blue"] * (1 + i % 5)} for i in range(90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_processor(folder / "processor", "red green blue")
    write_processor(folder / "other", "another text, for other merges: colour")
    (folder / "a.jsonl").write_bytes(lines(ROWS[:50]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[50:])))
    return folder


def run(folder: Path, *arguments: str) -> int:
    return main(["tokenize", *arguments, "--tokenizer", str(folder / "processor")])


def test_processes_write_the_same_files(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tokenize, "_CHUNK", 16)
    for name, processes in (("one", "1"), ("two", "2")):
        output = ["--output", str(tmp_path / name), "--processes", processes]
        assert run(folder, str(folder / "*.jsonl*"), *output) == 0
    for suffix in (".bin", ".idx"):
        one, two = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("one", "two"))
        assert one == two
    assert "90 documents" in capsys.readouterr().out
    processor = Qwen3VLProcessor.from_pretrained(folder / "processor")
    shard = opener()(tmp_path / "one.idx")
    assert shard.count == 90
    for number, row in enumerate(ROWS):
        ids = [*processor.tokenizer.encode("\n".join(row["text"])), processor.pad_token_id]
        np.testing.assert_array_equal(shard.read(number)["tokens"], ids)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [({"text": 3}, "of type int"), ({"text": "a<|im_end|>"}, "im_end"), ({}, "no 'text'")],
)
def test_bad_texts_are_named_or_counted(folder, tmp_path, bad, reason, capsys):
    (tmp_path / "bad.jsonl").write_bytes(lines([*ROWS[:3], bad, *ROWS[3:5]]))
    arguments = [str(tmp_path / "bad.jsonl"), "--output", str(tmp_path / "out")]
    assert run(folder, *arguments) == 1
    message = capsys.readouterr().err
    assert f"{tmp_path / 'bad.jsonl'}:4: " in message
    assert reason in message
    assert not list(tmp_path.glob("out*"))
    assert run(folder, *arguments, "--skip-bad") == 0
    assert "skipped: 1 of kind" in capsys.readouterr().out
    assert opener()(tmp_path / "out.idx").count == 5


def test_existing_files_are_kept(folder, tmp_path, capsys):
    (tmp_path / "out.bin").write_bytes(b"mine")
    assert run(folder, str(folder / "a.jsonl"), "--output", str(tmp_path / "out")) == 1
    assert "out.bin exists already" in capsys.readouterr().err
    assert (tmp_path / "out.bin").read_bytes() == b"mine"


def test_an_unknown_end_token_is_refused_first(folder, tmp_path, capsys):
    output = ["--output", str(tmp_path / "out"), "--end-token", "<eot>"]
    assert run(folder, str(folder / "a.jsonl"), *output) == 1
    assert "has no token '<eot>'" in capsys.readouterr().err


def test_a_run_with_another_tokenizer_refuses_the_files(folder, tmp_path):
    assert run(folder, str(folder / "a.jsonl"), "--output", str(tmp_path / "out")) == 0
    entries = [SourceConfig(path=str(tmp_path / "out"), format="text")]
    for name in ("processor", "other"):
        processor = Qwen3VLProcessor.from_pretrained(folder / name)
        if name == "processor":
            assert len(Corpus.opened(entries, VLDataConfig(), processor, 1)) == 50
        else:
            with pytest.raises(ValueError, match="written with another tokenizer"):
                Corpus.opened(entries, VLDataConfig(), processor, 1)
    assert json.loads((tmp_path / "out.json").read_text())["documents"] == 50
