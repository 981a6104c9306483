"""Lengths of samples, measured without their pixels.

Guarantees: they equal the lengths after loading, for images turned by EXIF, videos and cut samples,
with workers and without; they are measured once until a file or setting changes; bad samples fail
with their place or are left out and counted, also from the cache; a sample with too many vision
tokens for a row is bad; a damaged cache is made again
with one line in the log; an unwritable folder is no error.
"""

import json

import numpy as np
import pytest

from paddle_vl.data import sample_lengths as module
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.packing import RowBudget
from paddle_vl.data.sample_lengths import sample_lengths
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset
from tests.single_card_tests.data.video_files import write_video
from tests.single_card_tests.families.qwen3_vl.chat_builders import (
    question,
    random_image,
    tiny_processor,
    write_jsonl,
)

BUDGET = RowBudget(1000)


@pytest.fixture
def file(tmp_path):
    turned = random_image(8, 32, seed=2)
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    random_image(16, 8, seed=1).save(tmp_path / "a.png")
    write_video(tmp_path / "v.mp4", 6, size=(32, 16))
    rows = [
        question("hello hello", answer="A cat. " * 30),
        question("<image>?", images=["a.png"]),
        question("<image> and <image>?", images=["turned.jpg", "a.png"]),
        question("<video>?", videos=["v.mp4"]),
        question("<image><video>?", images=["a.png"], videos=["v.mp4"]),
    ]
    return write_jsonl(tmp_path / "a.jsonl", rows)


def dataset(file, **options) -> MessagesDataset:
    return MessagesDataset([file], tiny_processor(), **options)


def test_lengths_are_those_that_loading_gives(file):
    data = dataset(file, max_length=60)
    lengths = sample_lengths(data, BUDGET)
    visual = (data._processor.image_token_id, data._processor.video_token_id)
    for number in range(len(data)):
        ids = data[number]["input_ids"]
        assert lengths.tokens[number] == len(ids)
        assert lengths.vision[number] == np.isin(ids, visual).sum()
    assert lengths.tokens[0] == 60
    assert (lengths.vision[1:] > 0).all()


@pytest.mark.parametrize("part", [1, 2])
def test_workers_measure_the_same(file, monkeypatch, part):
    wanted = sample_lengths(dataset(file), BUDGET)
    for kept in file.parent.glob(".a.jsonl.lengths-*.npz"):
        kept.unlink()
    monkeypatch.setattr(module, "_CHUNK", part)
    found = sample_lengths(dataset(file), BUDGET, num_workers=1)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_array_equal(found.vision, wanted.vision)


def test_pixels_are_not_read(file, monkeypatch):
    def refuse(self):
        raise AssertionError("decoded")

    data = dataset(file)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    assert data.lengths(2)[1] > 0


def test_lengths_are_measured_once_until_something_changes(file, monkeypatch):
    measured = []
    monkeypatch.setattr(
        module, "_measure", lambda *args, real=module._measure: measured.append(0) or real(*args)
    )
    first = sample_lengths(dataset(file), BUDGET)
    again = sample_lengths(dataset(file), BUDGET)
    assert len(measured) == 1
    np.testing.assert_array_equal(again.tokens, first.tokens)
    np.testing.assert_array_equal(again.vision, first.vision)
    assert (sample_lengths(dataset(file, max_length=50), BUDGET).tokens <= 50).all()
    file.write_text(file.read_text().replace("hello hello", "hello cat?!"))
    sample_lengths(dataset(file), BUDGET)
    assert len(measured) == 3


@pytest.fixture
def with_bad(file):
    (file.parent / "broken.png").write_bytes(b"no image")
    rows = [*map(json.loads, file.read_text().splitlines())]
    rows.insert(1, question("<image>?", images=["broken.png"]))
    return write_jsonl(file, rows)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_sample_fails_with_its_place(with_bad, monkeypatch, num_workers):
    monkeypatch.setattr(module, "_CHUNK", 2)
    with pytest.raises(BadSampleError, match=r"a\.jsonl:2: image 1 .*broken\.png"):
        sample_lengths(dataset(with_bad), BUDGET, num_workers)


def test_skipped_samples_have_no_tokens_and_are_counted_every_time(with_bad):
    for _ in range(2):
        data = dataset(with_bad, on_bad_sample="skip")
        lengths = sample_lengths(data, BUDGET)
        assert np.flatnonzero(lengths.tokens == 0).tolist() == [1]
        assert data.skipped == {"unreadable_image": 1}


def test_too_many_vision_tokens_for_a_row_make_a_bad_sample(file):
    data = dataset(file)
    most = int(sample_lengths(data, BUDGET).vision.max())
    budget = RowBudget(1000, most - 1)
    place = r"a\.jsonl:\d: the sample has"
    with pytest.raises(BadSampleError, match=f"{place} {most} vision tokens.*max_vision_tokens"):
        sample_lengths(data, budget)
    data = dataset(file, on_bad_sample="skip")
    lengths = sample_lengths(data, budget)
    assert lengths.vision.max() < most
    assert data.skipped["too_many_vision_tokens"] == (lengths.tokens == 0).sum() > 0


DAMAGED = {
    "cut": lambda whole: whole[:40],
    "empty": lambda whole: b"",
    "zeros": lambda whole: bytes(len(whole)),
    "earlier version": lambda whole: whole[:-8],
    "longer": lambda whole: whole + b"a",
    **{f"byte {at}": lambda whole, at=at: flipped(whole, at) for at in range(0, 500, 61)},
}


def flipped(whole: bytes, at: int) -> bytes:
    at %= len(whole)
    return whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_of_lengths_is_made_again_with_one_line(file, caplog, damage):
    wanted = sample_lengths(dataset(file), BUDGET)
    (kept,) = file.parent.glob(".a.jsonl.lengths-*.npz")
    whole = kept.read_bytes()
    with np.load(kept) as readable:
        np.testing.assert_array_equal(readable["sizes"][:, 0], wanted.tokens)
    kept.write_bytes(damage(whole))
    found = sample_lengths(dataset(file), BUDGET)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_array_equal(found.vision, wanted.vision)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{kept} is damaged" in caplog.text
    np.testing.assert_array_equal(sample_lengths(dataset(file), BUDGET).tokens, wanted.tokens)
    assert len(caplog.records) == 1


def test_lengths_that_cannot_be_kept_are_measured_all_the_same(file, monkeypatch, caplog):
    def refuse(self, target):
        raise PermissionError("read-only folder")

    monkeypatch.setattr("pathlib.Path.replace", refuse)
    assert (sample_lengths(dataset(file), BUDGET).tokens > 0).all()
    assert "cannot be cached beside the data (read-only folder)" in caplog.text
