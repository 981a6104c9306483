"""The pretraining corpus around the digits.

Guarantees: held-out rows show no image and tell no story of the others; what a row says is true of
the images beside it; a page has as many texts as images, one of them None in each place; a complete
corpus is left unchanged.
"""

import json
import re
from pathlib import Path

from make_digits_corpus import HELD_OUT, SOURCES, make_digits_corpus
from make_digits_dataset import read_digits
from paddle_vl.families.vlm.inputs.processor import VLProcessor

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def rows_of(corpus: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (corpus / f"{name}.jsonl").read_text().splitlines()]


def images_of(row: dict) -> list[str]:
    images = row.get("images", [row["image"]] if "image" in row else [])
    return [image for image in images if image]


def digit_of(image: str, digits: list[int]) -> int:
    return digits[int(Path(image).stem)]


def told_digit(text: str) -> int:
    (found,) = re.findall(rf"\d|\b(?:{'|'.join(WORDS)})\b", text)[-1:]
    return WORDS.index(found) if found in WORDS else int(found)


def test_held_out_images_and_stories_are_in_no_other_file(corpus):
    names = (*SOURCES, "answers")
    shown = {image for name in names for row in rows_of(corpus, name) for image in images_of(row)}
    held_out = {
        image
        for name in names
        for row in rows_of(corpus, HELD_OUT + name)
        for image in images_of(row)
    }
    assert (len(shown), len(held_out)) == (1497, 300)
    assert not shown & held_out
    assert all((corpus / image).is_file() for image in shown | held_out)
    # Complete, it is left unchanged; the tokenizer knows its words.
    before = (corpus / "text.jsonl").stat().st_mtime_ns
    assert not make_digits_corpus(corpus)
    assert (corpus / "text.jsonl").stat().st_mtime_ns == before
    text = "This is seven: 7. The largest of them is 9."
    processor = VLProcessor.from_pretrained(corpus / "processor")
    assert len(processor.tokenizer.encode(text)) < len(text) / 2
    stories, others = (
        {row["text"] for row in rows_of(corpus, n)} for n in ("text", f"{HELD_OUT}text")
    )
    assert len(others) == 300
    assert not stories & others


def test_captions_and_answers_are_true_of_their_images(corpus):
    _, digits = read_digits()
    for prefix in ("", HELD_OUT):
        for row in rows_of(corpus, f"{prefix}captions"):
            assert told_digit(row["text"]) == digit_of(row["image"], digits), row
        for row in rows_of(corpus, f"{prefix}answers"):
            assert row["messages"][1]["content"] == str(digit_of(row["images"][0], digits))


def test_pages_tell_each_digit_behind_its_image(corpus):
    _, digits = read_digits()
    for row in rows_of(corpus, "pages"):
        texts, images = row["texts"], row["images"]
        assert [text is None for text in texts] == [image is not None for image in images]
        shown = [digit_of(image, digits) for image in images if image]
        behind = [texts[i + 1] for i, image in enumerate(images) if image]
        assert [told_digit(text) for text in behind] == shown
        if total := re.search(r"Together they make (\d+)", texts[-1]):
            assert int(total[1]) == sum(shown)
