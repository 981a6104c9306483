"""The digits dataset: real images, a clean split, and a folder with everything a run needs.

Guarantees: training conversations contain no test image; every test image has one single-digit
question; answers are right; an image is four visual tokens; writing is reproducible, and repeated
unless it was complete; the tool does the same.
"""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import make_digits_dataset as digits_module
from make_digits_dataset import make_digits_dataset
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from tests.support import forked

SPLITS = ("train", "copies", "test")
datasets = pytest.importorskip("sklearn.datasets")


def rows_of(directory: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (directory / f"{split}.jsonl").read_text().splitlines()]


def images_of(rows: list[dict]) -> set[str]:
    return {image for row in rows for image in row.get("images", ())}


def test_splits_are_apart_and_hold_all_tasks(digits):
    rows = {split: rows_of(digits, split) for split in SPLITS}
    train, copies, test = (images_of(rows[split]) for split in SPLITS)
    assert not train & test
    # A copy has the number of its image.
    assert {name[:-6] for name in copies} == {name[:-4] for name in train}
    assert len(train) + len(test) == 1797
    assert len(copies) == 4 * len(train)
    assert len(list((digits / "images").glob("*.png"))) == len(train | copies | test)
    # Every unseen image has one single question.
    asked = Counter(row["images"][0] for row in rows["test"] if row["task"] == "single")
    assert (set(asked), set(asked.values()), len(asked)) == (test, {1}, 300)
    assert Counter(row["task"] for row in rows["test"]) == {
        "single": 300, "two_turn": 100, "compare": 100, "add": 100
    }  # fmt: skip
    assert Counter(row["task"] for row in rows["train"]) == {
        "single": 2 * 1497, "two_turn": 1497, "compare": 1497, "add": 1497
    }  # fmt: skip
    tasks = Counter(row["task"] for row in rows["copies"])
    assert (tasks["pair"], tasks["fact"]) == (8 * 1497, 4 * 200)
    assert abs(tasks["single"] - tasks["two_turn"]) < 300
    assert tasks["single"] + tasks["two_turn"] == 4 * 1497
    answers = [row["messages"][-1]["content"] for row in rows["copies"] if "pair" in row["task"]]
    compared = [answer.endswith("they are equal.") for answer in answers if ": " in answer]
    assert 0.28 < np.mean(compared) < 0.37


def asked_about_two(question: str) -> str:
    if "larger" in question:
        return "compare"
    return "name" if "Which two" in question else "add"


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_right(digits, split):
    target = datasets.load_digits().target
    for row in rows_of(digits, split):
        question = row["messages"][0]["content"]
        if row["task"] == "fact":
            shown = [int(digit) for digit in re.findall(r"\d", question)]
        else:
            shown = [int(target[int(Path(image).stem[:4])]) for image in row["images"]]
        answers = [turn["content"] for turn in row["messages"] if turn["role"] == "assistant"]
        first, last = shown[0], shown[-1]
        larger = {1: "the first.", -1: "the second.", 0: "they are equal."}
        about_two = {
            "add": f"{first} + {last} = {first + last}",
            "compare": f"{first} - {last} = {first - last}: {larger[int(np.sign(first - last))]}",
            "name": f"{first} and {last}.",
        }
        if row["task"] in ("pair", "fact"):
            assert answers == [about_two[asked_about_two(question)]]
        elif row["task"] in about_two:
            assert answers == [about_two[row["task"]]]
        else:
            assert answers[0] in (str(first), f"The handwritten digit {first}.")
        if row["task"] == "two_turn":
            after = str(first + 1) if first < 9 else "After 9 comes 10."
            assert answers[1] in (["even", "odd"][first % 2], after)


def test_copies_are_moved_a_little_and_stay_on_white_paper(digits):
    number = Path(rows_of(digits, "train")[0]["images"][0]).stem
    image, *copies = (
        255.0 - np.asarray(Image.open(digits / "images" / f"{number}{copy}.png"))
        for copy in ("", "-1", "-2", "-3", "-4")
    )
    pixels = datasets.load_digits().images[int(number)]
    blocks = image.reshape(8, 8, 8, 8).mean(axis=(1, 3))
    assert np.corrcoef(blocks.ravel(), pixels.ravel())[0, 1] > 0.99
    assert image[pixels.repeat(8, 0).repeat(8, 1) == 0].mean() < 55
    for index, copy in enumerate(copies):
        assert all(np.abs(copy - other).mean() > 1 for other in (image, *copies[:index]))
        # Stretched by at most a tenth to each side; little ink leaves the paper.
        assert 0.8 < copy.sum() / image.sum() < 1.24
        # The centres of ink: a shift of at most four pixels to each side, a turn and a slant.
        assert np.abs(centre(copy) - centre(image)).max() < 6


def centre(ink: np.ndarray) -> np.ndarray:
    return np.array([np.average(np.arange(64), weights=ink.sum(axis)) for axis in (0, 1)])


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A folder made from the first 120 images."""
    pixels, target = digits_module.read_digits()
    monkeypatch.setattr(digits_module, "read_digits", lambda: (pixels[:120], target[:120]))
    monkeypatch.setattr(digits_module, "TEST_IMAGES_PER_DIGIT", 3)
    assert make_digits_dataset(tmp_path / "made")
    return tmp_path / "made"


def test_writing_is_reproducible(small, tmp_path):
    assert make_digits_dataset(tmp_path / "again")
    names = [path.relative_to(small) for path in small.rglob("*") if path.is_file()]
    assert len(names) > 400
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (small / name).read_bytes(), name


def test_directory_is_ready_for_a_run_with_four_visual_tokens_an_image(small):
    processor = VLProcessor.from_pretrained(small / "processor")
    for split in SPLITS:
        dataset = MessagesDataset([small / f"{split}.jsonl"], processor)
        # Behind the questions about images copies have those without.
        sample = dataset[len(dataset) - 1 - 200 * (split == "copies")]
        assert sample["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 4]]
        assert np.count_nonzero(sample["input_ids"] == processor.image_token_id) == 8
    assert dataset.conversation(0).extras == {"task": "single"}


def test_only_what_is_complete_and_of_this_recipe_is_left_alone(small, monkeypatch):
    assert not make_digits_dataset(small)
    (small / digits_module.MANIFEST).unlink()
    assert make_digits_dataset(small)
    monkeypatch.setattr(digits_module, "RECIPE_VERSION", digits_module.RECIPE_VERSION + 1)
    assert make_digits_dataset(small)
    assert not make_digits_dataset(small)


def test_tool_says_what_it_did(digits):
    tool = Path(__file__).parents[3] / "tools" / "make_digits_dataset.py"
    result = forked.run([str(tool), str(digits)])
    assert result.stdout == f"{digits}: complete already\n"
