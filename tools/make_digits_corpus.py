"""Write a corpus for pretraining: captions, pages and text around the quickstart's digits.

    python tools/make_digits_corpus.py DIRECTORY

The directory gets `images/` of `tools/make_digits_dataset.py`, and

    captions.jsonl   {"image", "text"}: a handwritten digit and a sentence about it
    pages.jsonl      {"texts", "images"}: two to four digits between the sentences of a page
    text.jsonl       {"text"}: little stories that count, add and compare; no image
    answers.jsonl    {"messages", "images"}: a question about a digit, for fine-tuning
    held_out_*.jsonl the same four, with images that the others do not show
    processor/       tokenizer and image processor for all of them

Everything follows from the seed. A complete directory is left unchanged.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from make_digits_dataset import make_digits_dataset, make_processor, read_digits

# Increase when the written files change.
RECIPE_VERSION = 1
SEED = 20260
MANIFEST = "corpus.json"
CAPTIONS_PER_IMAGE, NUM_PAGES, NUM_STORIES = 3, 3000, 6000
NUM_HELD_OUT = 300
SOURCES = ("captions", "pages", "text")
HELD_OUT = "held_out_"
Row = dict[str, Any]

_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_CAPTIONS = ("A handwritten {a}.", "The digit {a}.", "This is {word}: {a}.")
_OPENINGS = ("A page of digits.", "Some digits in a row.", "Look here.")
_BEHIND = ("That is {a}.", "It reads {a}.", "This is {word}: {a}.")
_CLOSINGS = (
    "Together they make {total}.",
    "The largest of them is {largest}.",
    "The last one was {last}.",
    "In order of size: {ordered}.",
)
_NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gil", "Hana")
_THINGS = ("apples", "stones", "shells", "cards", "nuts", "coins")
_STORIES = (
    "{name} has {a} {things} and finds {b} more. Now {name} has {total} {things}.",
    "{name} counts the {things}: {counted}. There are {b}.",
    "{name} has {a} {things} and {other} has {b}. No one has more than {most}.",
    "{Word} and {word_b} are {total}, {name} wrote about the {things}.",
    "After {a} comes {next}. {name} said so and took one more of the {things}.",
    "{name} gives {b} of {total} {things} to {other} and keeps {a}.",
)
_QUESTIONS = (
    "<image>Which digit is this?",
    "<image>What number do you see?",
    "<image>Name the digit in the picture.",
    "Read this handwritten digit: <image>",
)


def make_digits_corpus(directory: Path) -> bool:
    """Write the corpus unless it is complete; returns whether it was written.

    Raises:
        RuntimeError: scikit-learn is not installed.
    """
    manifest, wanted = directory / MANIFEST, {"recipe_version": RECIPE_VERSION, "seed": SEED}
    if manifest.is_file() and json.loads(manifest.read_text(encoding="utf-8")) == wanted:
        return False
    make_digits_dataset(directory / "digits")
    _, digits = read_digits()
    names = [f"digits/images/{number:04d}.png" for number in range(len(digits))]
    is_test = np.isin(names, sorted(_test_images(directory / "digits")))
    rng = np.random.default_rng(SEED)
    shown = [(names[number], digits[number]) for number in np.flatnonzero(~is_test)]
    unseen = [(names[number], digits[number]) for number in np.flatnonzero(is_test)]
    rows: dict[str, list[Row]] = {
        "captions": [_caption(*one, rng) for one in shown * CAPTIONS_PER_IMAGE],
        "pages": [_page(shown, rng) for _ in range(NUM_PAGES)],
        "text": [{"text": _story(rng)} for _ in range(NUM_STORIES)],
        "answers": [_answer(*one, rng) for one in shown],
        f"{HELD_OUT}captions": [_caption(*one, rng) for one in unseen],
        f"{HELD_OUT}pages": [_page(unseen, rng) for _ in range(NUM_HELD_OUT)],
        f"{HELD_OUT}answers": [_answer(*one, rng) for one in unseen],
    }
    told = {row["text"] for row in rows["text"]}
    rows[f"{HELD_OUT}text"] = _new_stories(told, rng)
    for name, of_source in rows.items():
        text = "".join(json.dumps(row) + "\n" for row in of_source)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")
    trained = chain.from_iterable(rows[name] for name in (*SOURCES, "answers"))
    texts = [text.replace("<image>", "\n") for row in trained for text in _texts(row)]
    make_processor(texts).save_pretrained(directory / "processor")
    # Last: if it exists, the corpus is complete.
    manifest.write_text(json.dumps(wanted), encoding="utf-8")
    return True


def _test_images(dataset: Path) -> set[str]:
    lines = (dataset / "test.jsonl").read_text(encoding="utf-8").splitlines()
    return {f"digits/{image}" for line in lines for image in json.loads(line)["images"]}


def _caption(image: str, digit: int, rng: np.random.Generator) -> Row:
    return {"image": image, "text": _one(_CAPTIONS, rng).format(**_facts(digit))}


def _page(shown: Sequence[tuple[str, int]], rng: np.random.Generator) -> Row:
    """A sentence, then each digit with a sentence behind it, then a sentence about all."""
    chosen = [shown[int(i)] for i in rng.integers(len(shown), size=rng.integers(2, 5))]
    digits = [digit for _, digit in chosen]
    texts: list[str | None] = [_one(_OPENINGS, rng)]
    images: list[str | None] = [None]
    for image, digit in chosen:
        texts += [None, _one(_BEHIND, rng).format(**_facts(digit))]
        images += [image, None]
    facts = {
        "total": sum(digits),
        "largest": max(digits),
        "last": digits[-1],
        "ordered": ", ".join(map(str, sorted(digits))),
    }
    texts.append(_one(_CLOSINGS, rng).format(**facts))
    return {"texts": texts, "images": [*images, None]}


def _story(rng: np.random.Generator) -> str:
    """One to three sentences of the same people and numbers."""
    return " ".join(_sentence(rng) for _ in range(int(rng.integers(1, 4))))


def _sentence(rng: np.random.Generator) -> str:
    a, b = (int(number) for number in rng.integers(1, 10, size=2))
    name, other = (_NAMES[int(i)] for i in rng.choice(len(_NAMES), size=2, replace=False))
    facts = {
        **_facts(a),
        "b": b,
        "word_b": _WORDS[b],
        "total": a + b,
        "next": a + 1,
        "counted": ", ".join(map(str, range(1, b + 1))),
        "name": name,
        "other": other,
        "most": name if a >= b else other,
        "things": _one(_THINGS, rng),
    }
    return _one(_STORIES, rng).format(**facts)


def _new_stories(told: set[str], rng: np.random.Generator) -> list[Row]:
    found: dict[str, None] = {}
    while len(found) < NUM_HELD_OUT:
        story = _story(rng)
        if story not in told:
            found[story] = None
    return [{"text": story} for story in found]


def _answer(image: str, digit: int, rng: np.random.Generator) -> Row:
    question = {"role": "user", "content": _one(_QUESTIONS, rng)}
    answer = {"role": "assistant", "content": str(digit)}
    return {"messages": [question, answer], "images": [image]}


def _facts(digit: int) -> dict[str, Any]:
    return {"a": digit, "word": _WORDS[digit], "Word": _WORDS[digit].capitalize()}


def _texts(row: Row) -> Iterator[str]:
    if "messages" in row:
        yield from (message["content"] for message in row["messages"])
    else:
        yield from (text for text in row.get("texts", [row.get("text")]) if text)


def _one(choices: Sequence[str], rng: np.random.Generator) -> str:
    return choices[int(rng.integers(len(choices)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("directory", help="folder to write; left unchanged if it is complete")
    directory = Path(parser.parse_args().directory)
    written = make_digits_corpus(directory)
    print(f"{directory}: {'written' if written else 'complete already'}")


if __name__ == "__main__":
    main()
