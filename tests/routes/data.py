"""The data of the routes: what the documented tools write, with the first rows of each file."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import make_demonstrations
from learn_digit_preferences import write_pairs
from learn_documents import OPTIONS, write_processor
from make_digits_corpus import make_digits_corpus
from make_digits_dataset import write_prompts
from make_documents_dataset import TASKS, make_documents_dataset
from paddle_vl.cli.main import main
from tests.support.pi07_golden import character_tokenizer

DATA, CORPUS, ARM = "runs/digits/data", "runs/digits_corpus", "data/demonstrations"
PAGES = "runs/documents"
VIDEOS = Path(__file__).parents[1] / "data" / "lerobot" / "v21_video" / "videos"
# Of a file; three steps take 180.
_ROWS = 320
# Answers of models that have learned three steps differ by it.
_REWARD = """\
def letters(completions, **_):
    return [float(sum(map(str.isalnum, each[0]["content"]))) for each in completions]
"""
_SUITE = """\
name: Digits
path: runs/asked.jsonl
images: [image]
prompt: "{{ ask }}"
references: right
metrics: [exact_match]
generation: {max_new_tokens: 4}
"""
_SUITE_OF_PAGES = """\
name: Lines
path: runs/documents/data/asked.jsonl
images: [image]
prompt: "OCR:"
references: text
metrics: [cer, ned]
generation: {max_new_tokens: 4}
"""


def write_data(folder: Path) -> None:
    """The data of the configurations, in their places below a folder, and some of the kinds that
    the docs name."""
    whole = folder / "whole"
    make_digits_corpus(whole)
    write_prompts(whole / "digits")
    for made, name, images in ((whole / "digits", DATA, "images"), (whole, CORPUS, "digits")):
        (folder / name).mkdir(parents=True)
        for entry in (images, "processor"):
            (folder / name / entry).symlink_to(made / entry)
        for file in made.glob("*.jsonl"):
            every = 20 if file.name.startswith(("test", "held_out")) else 1
            write_rows(folder / name / file.name, rows_of(file)[::every][:_ROWS])
    text, tokens, processor = (
        str(folder / CORPUS / name) for name in ("text.jsonl", "tokens", "processor")
    )
    assert main(["tokenize", text, "--tokenizer", processor, "--output", tokens]) == 0
    _write_answers(whole / "digits", folder / "pairs")
    _write_demonstrations(folder / ARM)
    _write_pages(folder / PAGES)
    rows = [
        {
            "messages": [
                {"role": "user", "content": "<video>What number?" + " Look." * (number % 3)},
                {"role": "assistant", "content": f"{number % 7}"},
            ],
            "videos": [str(file)],
        }
        for number, file in enumerate(sorted(VIDEOS.rglob("*.mp4")) * 2)
    ]
    write_rows(folder / "runs/videos.jsonl", rows)
    asked = [
        {
            "ask": row["messages"][0]["content"].replace("<image>", ""),
            "image": f"digits_corpus/{row['images'][0]}",
            "right": row["messages"][1]["content"],
        }
        for row in rows_of(folder / CORPUS / "held_out_answers.jsonl")
    ]
    write_rows(folder / "runs/asked.jsonl", asked)
    (folder / "runs/letters.py").write_text(_REWARD)
    (folder / "runs/suite.yaml").write_text(_SUITE)
    (folder / "runs/suite_of_pages.yaml").write_text(_SUITE_OF_PAGES)


def _write_answers(digits: Path, pairs: Path) -> None:
    """Pairs of answers, and the same rated."""
    write_pairs(digits, pairs)
    rows = rows_of(pairs / "train.jsonl")
    # Half of them about styles, half about other questions.
    rows = rows[:: len(rows) // _ROWS]
    write_rows(pairs / "train.jsonl", rows)
    write_rows(pairs / "test.jsonl", rows_of(pairs / "test.jsonl")[::20])
    _write_rated(pairs / "rated.jsonl", rows)


def _write_rated(file: Path, pairs: Sequence[dict]) -> None:
    """Pairs as rows of one answer each, a third of them rejected."""
    for number, row in enumerate(pairs):
        row["label"], other = number % 3 > 0, row.pop("rejected_response")
        if not row["label"]:
            row["messages"][-1]["content"] = other
    write_rows(file, pairs)


def _write_demonstrations(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["make_demonstrations.py", str(folder)])
        make_demonstrations.main()
    write_rows(folder / "held_out.jsonl", rows_of(folder / "arm-joint.jsonl")[5::24])
    # Beside the small Gemma 3 of the tests.
    gemma = shutil.copytree(folder / "processor", folder.with_name("gemma_processor"))
    character_tokenizer().save_pretrained(gemma)


def _write_pages(folder: Path) -> None:
    """Pages of every task, their processor, and pairs of answers to lines."""
    data, options = folder / "data", replace(OPTIONS, held_out=8)
    make_documents_dataset(data, dict.fromkeys(TASKS, 48), options)
    write_processor(folder / "processor")
    asked = [
        {"image": row["images"][0], "text": row["messages"][1]["content"]}
        for row in rows_of(data / "text_test.jsonl")
    ]
    write_rows(data / "asked.jsonl", asked)
    pairs = rows_of(data / "text_train.jsonl")
    prompts = [
        {**row, "messages": row["messages"][:1], "solution": row["messages"][1]["content"]}
        for row in pairs
    ]
    write_rows(data / "prompts.jsonl", prompts)
    for row, other in zip(pairs, pairs[1:] + pairs[:1], strict=True):
        row["rejected_response"] = other["messages"][1]["content"]
    write_rows(data / "pairs.jsonl", pairs)
    _write_rated(data / "rated.jsonl", pairs)


def rows_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_rows(file: Path, rows: Sequence[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
