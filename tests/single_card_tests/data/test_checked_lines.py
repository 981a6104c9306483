"""Lines that were checked are not read at the next start.

Guarantees: a dataset of an unchanged file equals that of the first start without parsing a line;
whatever decides on a check makes the file read again: the line, an image, a setting, the processor,
the package; a file with a bad line, a short one and a damaged record are read at every
start; lengths that were measured on the way equal those of the samples, and refused samples are
refused where lengths are asked for.
"""

import os
from dataclasses import replace

import numpy as np
import pytest

from paddle_vl.data import checked_lines
from paddle_vl.data.corpus.cache import Cache
from paddle_vl.data.formats.keys import RowSettings
from paddle_vl.data.formats.reader import RowReader
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset
from tests.single_card_tests.data.video_files import write_video
from tests.single_card_tests.families.qwen3_vl.chat_builders import (
    question,
    random_image,
    tiny_processor,
    write_jsonl,
)

PROCESSOR = tiny_processor()
READER = RowReader(RowSettings(control_tokens={f"<{n}>" for n in range(9)}))


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(checked_lines, "_FEWEST", 3)
    (tmp_path / "package").mkdir()
    monkeypatch.setattr(checked_lines, "_PACKAGE", tmp_path / "package")
    random_image(16, 8, seed=1).save(tmp_path / "a.png")
    write_video(tmp_path / "v.mp4", 6, size=(32, 16))
    rows = [
        question("hello", answer="A cat.") | {"note": 1},
        question("<image>?", images=["a.png"]),
        question("<image><video>?", images=["a.png"], videos=["v.mp4"]),
    ]
    return write_jsonl(tmp_path / "a.jsonl", rows)


@pytest.fixture
def parsed(monkeypatch):
    """Lines that are parsed."""
    seen, parse = [], MessagesDataset._parsed

    def watched(self, line, number):
        seen.append(line)
        return parse(self, line, number)

    monkeypatch.setattr(MessagesDataset, "_parsed", watched)
    return seen


def opened(*files, processor=PROCESSOR, reader=READER, **options):
    return MessagesDataset(files, processor, reader=reader, cache=Cache(), **options)


def test_an_unchanged_file_is_not_read_again(file, parsed, caplog):
    first = opened(file)
    assert len(parsed) == 3
    assert "note" in caplog.text
    parsed.clear()
    caplog.clear()
    second = opened(file, reader=replace(READER))
    assert not parsed
    assert second.fingerprint == first.fingerprint
    assert second.contents == first.contents
    np.testing.assert_array_equal(second.positions_N3, first.positions_N3)
    assert second._readers == first._readers
    assert second._unread == first._unread == [{"note": None}]
    with np.load(file.parent / ".paddle_vl" / "a.jsonl.checked") as readable:
        assert readable["steps"].shape == (3, 2)
    for number in range(3):
        for key, value in first[number].items():
            np.testing.assert_array_equal(second[number][key], value)


def same_times(path, edit):
    """Edit a file, and set its times to those before."""
    found = path.stat()
    edit(path)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def edit_line(file):
    same_times(file, lambda path: path.write_bytes(path.read_bytes().replace(b"cat", b"dog")))


def edit_image(file):
    same_times(file.with_name("a.png"), lambda path: random_image(16, 8, seed=2).save(path))


CHANGES = {
    "line": (edit_line, {}),
    "image": (edit_image, {}),
    "video": (lambda file: write_video(file.with_name("v.mp4"), 4, size=(32, 16)), {}),
    "package": (lambda file: (file.parent / "package" / "new.py").write_text(""), {}),
    "setting of lines": (lambda file: None, {"max_line_bytes": 5000}),
    "setting of rows": (lambda file: None, {"reader": replace(READER, allow_outside=False)}),
    "processor": (lambda file: None, {"processor": PROCESSOR.with_max_pixels(1024)}),
    "record": (
        lambda file: file.with_name(".paddle_vl").joinpath("a.jsonl.checked").write_bytes(b"1"),
        {},
    ),
}


@pytest.mark.parametrize(("change", "options"), CHANGES.values(), ids=CHANGES)
def test_what_decides_on_a_check_makes_the_file_read_again(file, parsed, change, options):
    opened(file)
    parsed.clear()
    change(file)
    opened(file, **options)
    assert len(parsed) == 3
    parsed.clear()
    opened(file, **options)
    assert not parsed


def test_an_image_that_is_gone_is_refused(file):
    opened(file)
    file.with_name("a.png").unlink()
    with pytest.raises(BadSampleError, match=r"a\.jsonl:2: .*a\.png does not exist"):
        opened(file)


def test_bad_and_short_files_are_read_at_every_start(file, parsed, tmp_path):
    bad = write_jsonl(tmp_path / "bad.jsonl", [question()] * 3 + [question("<image>")])
    short = write_jsonl(tmp_path / "short.jsonl", [question()] * 2)
    for _ in range(2):
        parsed.clear()
        dataset = opened(bad, file, short, on_bad_sample="skip")
        assert dataset.skipped == {"tag_count": 1}
        assert dataset.positions_N3[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert len(parsed) == 6


def test_lengths_measured_on_the_way_are_those_of_the_samples(file, parsed):
    texts = write_jsonl(file.with_name("b.jsonl"), [question(answer="hi " * 40), question("hello")])
    file.with_name("a.png").write_bytes(b"no image")
    dataset = MessagesDataset([texts, file], PROCESSOR, 40, measures=True)
    parsed.clear()
    found = [dataset.lengths(number) for number in (0, 1, 2)]
    assert not parsed
    wanted = MessagesDataset([texts, file], PROCESSOR, 40)
    assert found == [wanted.lengths(number) for number in (0, 1, 2)]
    for number in (3, 4):
        with pytest.raises(BadSampleError, match=rf"a\.jsonl:{number - 1}: image 1 .*a\.png"):
            dataset.lengths(number)
