"""Write the quickstart's dataset: images of handwritten digits, conversations and a processor.

    python tools/make_digits_dataset.py DIRECTORY [--prompts]

Source: the digits that scikit-learn ships (1797 images of 8 x 8 pixels, 17 grey levels, from the
UCI optical recognition set), written as PNG files: dark ink on white paper, enlarged to 64 x 64 by
bicubic interpolation. Training conversations contain no test image.

The directory gets `images/`, `train.jsonl`, `copies.jsonl`, `test.jsonl`, `processor/` and
`dataset.json`. `copies.jsonl` is for training too: questions about copies of the training images,
turned, slanted, stretched and shifted a little (`0007-1.png` is the first one of `0007.png`).
Tasks of records: single, compare, add, two_turn; in `copies.jsonl` single, two_turn, pair, a
question about two images, and fact, one about two numbers without an image.

With `--prompts` two questions that no conversation begins with, and their answers, are written for
a run that learns from rewards (configs/quickstart/digits_grpo.yaml): `prompts.jsonl` and, of other
images of the training conversations, `validation_prompts.jsonl`; of the test images
`test_prompts.jsonl`. `validation_tasks.jsonl` and `test_tasks.jsonl` have the tasks of
`train.jsonl` about each of these images. `old_prompts.jsonl` has the comparisons and sums of
`train.jsonl` without validation images, as prompts.

Comparisons and sums are worked out ("3 + 8 = 11", "3 - 8 = -5: the second."), and facts have the
same answers, so that a model takes a result from the digits that it has named, not from the images
once more.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image

from paddle_vl.families.vlm.inputs.processor import VLProcessor

# Increase when the written files change.
RECIPE_VERSION = 5
SEED = 20240
TEST_IMAGES_PER_DIGIT = 30
NUM_TEST_PAIRS = 100
NUM_VALIDATION_IMAGES = 150
IMAGE_SIDE = 64
# Copies of every training image, and by how much they are changed at most: shifts in pixels.
NUM_COPIES, MAX_DEGREES, MAX_SLANT, MAX_STRETCH, MAX_SHIFT = 4, 10, 0.15, 0.1, 4
PAIRS_PER_COPY = 2
# Share of the comparisons of copies that show a digit twice; chance gives a tenth, too few.
EQUAL_SHARE = 0.25
VOCAB_SIZE = 512
MANIFEST = "dataset.json"

_SINGLE = (
    ("<image>Which digit is this?", "{a}"),
    ("<image>What number do you see?", "{a}"),
    ("<image>Name the digit in the picture.", "{a}"),
    ("Read this handwritten digit: <image>", "{a}"),
    ("<image>Describe the picture.", "The handwritten digit {a}."),
)
_LARGER, _SUM = "{a} - {b} = {difference}: {larger}.", "{a} + {b} = {sum}"
_COMPARE = (
    ("<image><image>Which digit is larger, the first or the second?", _LARGER),
    ("First: <image> Second: <image> Which one is larger?", _LARGER),
)
_ADD = (
    ("<image><image>What is the sum of the two digits?", _SUM),
    ("<image> plus <image> equals?", _SUM),
)
_NAME_TWO = (("<image><image>Which two digits are these?", "{a} and {b}."),)
_ABOUT_TWO = (_COMPARE, _ADD, _NAME_TWO)
_FACTS = (("What is {a} + {b}?", _SUM), ("Which is larger, {a} or {b}?", _LARGER))
_FOLLOW_UP = (
    ("Is it even or odd?", "{parity}"),
    ("Which digit comes next?", "{next}"),
)


def make_digits_dataset(directory: str | os.PathLike) -> bool:
    """Write the dataset unless it is complete; returns whether it was written.

    The files are the same on every machine, up to the compression of PNG files.

    Raises:
        RuntimeError: scikit-learn is not installed.
    """
    directory = Path(directory)
    manifest, wanted = directory / MANIFEST, {"recipe_version": RECIPE_VERSION, "seed": SEED}
    if manifest.is_file() and json.loads(manifest.read_text(encoding="utf-8")) == wanted:
        return False
    pixels, digits = read_digits()
    names = [f"images/{number:04d}.png" for number in range(len(digits))]
    rng = np.random.default_rng(SEED)
    is_test = _choose_test_images(digits, rng)
    trained = np.flatnonzero(~is_test)
    records = {
        "train": list(_train_records(trained, digits, names, rng)),
        "test": list(_test_records(np.flatnonzero(is_test), digits, names, rng)),
        "copies": [],
    }
    (directory / "images").mkdir(parents=True, exist_ok=True)
    images = [_image(image) for image in pixels]
    for name, image in zip(names, images, strict=True):
        image.save(directory / name)
    for copy in range(1, NUM_COPIES + 1):
        copies = [name.replace(".", f"-{copy}.") for name in names]
        for number in trained:
            _moved(images[number], rng).save(directory / copies[number])
        records["copies"] += _about_copies(trained, digits, copies, rng)
    for split, rows in records.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{split}.jsonl").write_text(text, encoding="utf-8")
    make_processor(_texts_of(records["train"])).save_pretrained(directory / "processor")
    # Last: if it exists, the dataset is complete.
    manifest.write_text(json.dumps(wanted), encoding="utf-8")
    return True


def write_prompts(directory: str | os.PathLike) -> None:
    """Write the questions of `--prompts` beside the dataset."""
    _, digits = read_digits()
    names = [f"images/{number:04d}.png" for number in range(len(digits))]
    rng = np.random.default_rng(SEED)
    is_test = _choose_test_images(digits, rng)
    trained = rng.permutation(np.flatnonzero(~is_test))
    splits = {
        "prompts": trained[NUM_VALIDATION_IMAGES:],
        "validation_prompts": trained[:NUM_VALIDATION_IMAGES],
        "test_prompts": np.flatnonzero(is_test),
    }
    for split, numbers in splits.items():
        rows = []
        for number in numbers:
            for task, (question, answer) in zip(("parity", "next"), _FOLLOW_UP, strict=True):
                asked, right = _messages([(f"<image>{question}", answer)], *[digits[number]] * 2)
                solution = right["content"]
                row = {"task": task, "messages": [asked], "images": [names[number]]}
                rows.append(json.dumps({**row, "solution": solution}) + "\n")
        (Path(directory) / f"{split}.jsonl").write_text("".join(rows), encoding="utf-8")
    unseen = {names[number] for number in splits["validation_prompts"]}
    lines = (Path(directory) / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = []
    for row in map(json.loads, lines):
        *asked, right = row.pop("messages")
        if row["task"] in ("compare", "add") and unseen.isdisjoint(row["images"]):
            row |= {"messages": asked, "solution": right["content"]}
            rows.append(json.dumps(row) + "\n")
    (Path(directory) / "old_prompts.jsonl").write_text("".join(rows), encoding="utf-8")
    for split in ("test", "validation"):
        tasks = _train_records(splits[f"{split}_prompts"], digits, names, rng)
        text = "".join(json.dumps(row) + "\n" for row in tasks)
        (Path(directory) / f"{split}_tasks.jsonl").write_text(text, encoding="utf-8")


def read_digits() -> tuple[np.ndarray, list[int]]:
    """Pixels `[N, 8, 8]`, 0 paper to 16 ink, and the digit of each image."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise RuntimeError(
            "the digits are part of scikit-learn, which is not installed: pip install scikit-learn"
        ) from error
    data = cast(Any, load_digits())  # a Bunch, without a type for its fields
    return data.images, data.target.tolist()


def _image(pixels: np.ndarray) -> Image.Image:
    gray = np.rint(255 - pixels * (255 / 16)).astype(np.uint8)
    size = (IMAGE_SIDE, IMAGE_SIDE)
    return Image.fromarray(gray).resize(size, Image.Resampling.BICUBIC)


def _moved(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    angle = np.deg2rad(rng.uniform(-MAX_DEGREES, MAX_DEGREES))
    slant = rng.uniform(-MAX_SLANT, MAX_SLANT)
    stretch_2 = 1 + rng.uniform(-MAX_STRETCH, MAX_STRETCH, 2)
    shift_2 = rng.uniform(-MAX_SHIFT, MAX_SHIFT, 2)
    turn_22 = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    map_22 = turn_22 @ np.array([[1, slant], [0, 1]]) @ np.diag(stretch_2)
    # Pillow asks where a pixel of the copy comes from; the center stays but for the shift.
    center = (np.array(image.size) - 1) / 2
    from_2 = center - map_22 @ (center + shift_2)
    rows = [value for row, start in zip(map_22, from_2, strict=True) for value in (*row, start)]
    return image.transform(
        image.size, Image.Transform.AFFINE, rows, Image.Resampling.BICUBIC, fillcolor=255
    )


def _choose_test_images(digits: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """`[N]` bool, True at test images: equally many of every digit."""
    is_test = np.zeros(len(digits), dtype=bool)
    for digit in range(10):
        numbers = np.flatnonzero(np.array(digits) == digit)
        is_test[rng.permutation(numbers)[:TEST_IMAGES_PER_DIGIT]] = True
    return is_test


def _train_records(
    numbers: np.ndarray, digits: Sequence[int], names: Sequence[str], rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """For every image: two single questions, one dialogue, one comparison and one sum."""
    partners = {task: rng.permutation(numbers) for task in ("compare", "add")}
    for index, number in enumerate(numbers):
        first, second = rng.choice(len(_SINGLE), size=2, replace=False)
        yield _record("single", [number], [_SINGLE[first]], digits, names)
        yield _record("single", [number], [_SINGLE[second]], digits, names)
        turns = [_pick(_SINGLE, rng), _pick(_FOLLOW_UP, rng)]
        yield _record("two_turn", [number], turns, digits, names)
        for task, phrasings in (("compare", _COMPARE), ("add", _ADD)):
            pair = [number, partners[task][index]]
            yield _record(task, pair, [_pick(phrasings, rng)], digits, names)


def _about_copies(
    numbers: np.ndarray, digits: Sequence[int], names: Sequence[str], rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """For every image: one question about it, every second one with another turn, and two about it
    and another image. Short, so that a row of packed samples shows many images. Then the facts of
    every two digits."""
    alike = {digit: [n for n in numbers if digits[n] == digit] for digit in set(digits)}
    partners_of = [rng.permutation(numbers) for _ in range(PAIRS_PER_COPY)]
    for number, *partners in zip(numbers, *partners_of, strict=True):
        turns = [_pick(_SINGLE, rng)]
        if rng.random() < 0.5:
            turns.append(_pick(_FOLLOW_UP, rng))
        yield _record(("single", "two_turn")[len(turns) - 1], [number], turns, digits, names)
        for partner in partners:
            phrasings = _ABOUT_TWO[int(rng.integers(3))]
            if phrasings is _COMPARE and rng.random() < EQUAL_SHARE:
                partner = rng.choice(alike[digits[number]])
            yield _record("pair", [number, partner], [_pick(phrasings, rng)], digits, names)
    for a, b in product(range(10), repeat=2):
        for turn in _FACTS:
            yield {"task": "fact", "messages": _messages([turn], a, b)}


def _test_records(
    numbers: np.ndarray, digits: Sequence[int], names: Sequence[str], rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """One question about every image, then `NUM_TEST_PAIRS` of each other task."""
    for number in numbers:
        yield _record("single", [number], [_pick(_SINGLE, rng)], digits, names)
    for number in rng.permutation(numbers)[:NUM_TEST_PAIRS]:
        turns = [_pick(_SINGLE, rng), _pick(_FOLLOW_UP, rng)]
        yield _record("two_turn", [number], turns, digits, names)
    for task, phrasings in (("compare", _COMPARE), ("add", _ADD)):
        pairs = rng.permutation(numbers)[: 2 * NUM_TEST_PAIRS].reshape(-1, 2)
        for pair in pairs:
            yield _record(task, pair.tolist(), [_pick(phrasings, rng)], digits, names)


def _record(
    task: str,
    numbers: Sequence[int],
    turns: Sequence[tuple[str, str]],
    digits: Sequence[int],
    names: Sequence[str],
) -> dict[str, Any]:
    messages = _messages(turns, digits[numbers[0]], digits[numbers[-1]])
    return {"task": task, "messages": messages, "images": [names[number] for number in numbers]}


def _messages(turns: Sequence[tuple[str, str]], a: int, b: int) -> list[dict[str, str]]:
    """Questions and answers about one digit or two."""
    facts = {
        "a": a,
        "b": b,
        "sum": a + b,
        "difference": a - b,
        "larger": "the first" if a > b else "the second" if b > a else "they are equal",
        "parity": "odd" if a % 2 else "even",
        "next": (a + 1) % 10 if a < 9 else "After 9 comes 10.",
    }
    messages = []
    for question, answer in turns:
        messages.append({"role": "user", "content": question.format(**facts)})
        messages.append({"role": "assistant", "content": answer.format(**facts)})
    return messages


def _pick(phrasings: Sequence[tuple[str, str]], rng: np.random.Generator) -> tuple[str, str]:
    return phrasings[int(rng.integers(len(phrasings)))]


def _texts_of(records: Sequence[dict[str, Any]]) -> list[str]:
    texts = (message["content"] for row in records for message in row["messages"])
    # Tags are removed before text is encoded.
    return [text.replace("<image>", "\n") for text in texts]


def make_processor(texts: Sequence[str]) -> VLProcessor:
    """A processor with a tokenizer trained on the texts; an image gives four visual tokens."""
    pixels = IMAGE_SIDE**2
    return VLProcessor.from_texts(texts, VOCAB_SIZE, min_pixels=pixels, max_pixels=pixels)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("directory", help="folder to write; left unchanged if it is complete")
    parser.add_argument("--prompts", action="store_true", help="write prompts for rewards too")
    arguments = parser.parse_args()
    directory = arguments.directory
    written = make_digits_dataset(directory)
    if arguments.prompts:
        write_prompts(directory)
    print(f"{directory}: {'written' if written else 'complete already'}")


if __name__ == "__main__":
    main()
