"""Metrics of answers: the numbers of their definitions, of sacrebleu and of rouge-score."""

import re
from pathlib import Path

import pytest

from paddle_vl.families.vlm.evaluation.metrics import Scored, metric_named

OPTIONS = {"options": "['a red hat', 'a red hat box', '5', 'none']"}


def scored(name: str, samples: list[Scored]) -> tuple[dict, list[dict]]:
    metric = metric_named(name)
    own = [metric.own(each) for each in samples]
    return metric.score(samples, own), own


def number(metric: str, answer: str, *references: str, **row) -> float:
    overall, own = scored(metric, [Scored(answer, references, row)])
    assert own in ([overall], [{}])
    return next(iter(overall.values()))


@pytest.mark.parametrize(
    ("metric", "answer", "references", "wanted"),
    [
        ("exact_match", "red", ["blue", "red"], 1),
        ("exact_match", "Red", ["red"], 0),
        # Two edits of seven letters; of the nearest reference; below one half nothing counts.
        ("anls", "Sitting", ["kitting", "sitten"], 6 / 7),
        ("anls", "invoice  NO 7", ["invoice no 7"], 1),
        ("anls", "abcd", ["abxy"], 0),
        ("anls", "a", ["a very long answer"], 0),
        ("relaxed_accuracy", "104.9", ["100"], 1),
        ("relaxed_accuracy", "105.1", ["100"], 0),
        ("relaxed_accuracy", "14%", ["0.14"], 1),
        ("relaxed_accuracy", "0", ["0"], 1),
        ("relaxed_accuracy", "nan", ["100"], 0),
        ("relaxed_accuracy", "Yes", ["yes"], 1),
        ("pointing", '[{"point_2d": [210, 300], "label": "cup"}]', ["[200, 290, 300, 400]"], 1),
        ("pointing", "(210, 300)", ["[250, 320]"], 1),
        ("pointing", "[100, 200, 300, 400]", ["[260, 320]"], 0),
        ("pointing", "there", ["[260, 320]"], 0),
    ],
)
def test_numbers_of_an_answer(metric, answer, references, wanted):
    assert number(metric, answer, *references) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("B", "B"), ("(b).", "B"), ("B. because a hat box is a box", "B"), ("**Answer: C**", "C"),
        ("The correct option is (D)", "D"), ("A or B? The answer is A", "A"),
        ("I think a person would say (C)", "C"), ("Not A. So I choose B", "B"), ("None", "D"),
        ("It shows a red hat box.", "B"), ("a red hat", "A"), ("There are 5 of them", "C"),
        ("There are 15 of them", ""), ("A man with a scarf", ""), ("E", ""),
    ],
)  # fmt: skip
def test_choice_in_free_text(answer, wanted):
    for letter in "ABCD":
        assert number("multiple_choice", answer, letter, **OPTIONS) == (letter == wanted)
    # Columns of letters, and no options: only a letter is found.
    columns = {"A": "a red hat", "B": "a red hat box", "C": 5, "D": "none"}
    assert number("multiple_choice", answer, wanted or "A", **columns) == bool(wanted)
    assert number("multiple_choice", "The answer is B", "B") == 1
    assert number("multiple_choice", "", "B", options=[".", "b"]) == 0
    assert number("multiple_choice", "something else", "A", options=[".", "b"]) == 0


@pytest.mark.parametrize(
    ("answer", "reference", "wanted"),
    [
        ("(B)", "B", 0), ("so x = 1,234.5\nThe final answer is 24.004", "24", 1),
        ("the result is 24.1", "24", 0), ("It is the mitral valve.", "Mitral valve", 1),
        ("It is ten", "t", 0), ("The answer is t", "t", 1),
    ],
)  # fmt: skip
def test_open_questions_of_mmmu(answer, reference, wanted):
    row = OPTIONS if reference == "B" else {"options": "[]"}
    assert number("mmmu", answer, reference, **row) == (1 if row is OPTIONS else wanted)


@pytest.mark.parametrize(
    "answer",
    [
        "[100, 100, 300, 300]",
        '```json\n[{"bbox_2d": [100, 100, 300, 300], "label": "hinge"}]\n```',
        "<|box_start|>(100,100),(300,300)<|box_end|>",
        "It is at (100, 100), (300, 300).",
    ],
)
def test_boxes_in_every_spelling(answer):
    overall, _ = scored("box", [Scored(answer, ["[100, 100, 300, 200]"])])
    assert overall == {
        "box_iou": 0.5, "box_precision_0.5": 1, "box_precision_0.7": 0, "box_precision_0.9": 0
    }  # fmt: skip


def test_boxes_are_matched_one_to_one():
    wanted = "[0, 0, 100, 100] [200, 200, 300, 300]"
    twice = '[{"bbox_2d": [0, 0, 100, 100]}, {"bbox_2d": [0, 0, 100, 90]}]'
    samples = [Scored(twice, [wanted, "[0, 0, 9, 9]"]), Scored("?", [wanted])]
    overall, own = scored("box", samples)
    assert own[0]["box_iou"] == own[0]["box_precision_0.9"] == 0.5
    assert overall["box_iou"] == 0.25
    # A wrong box in front takes no partner from a right one; endless digits are no box.
    for wrong in ("[500, 500, 600, 600]", "[0, 0, 10, 10]"):
        assert number("box", f"{wrong} [0, 0, 100, 100]", wanted) >= 0.5
    for endless in ("[0, 0, 9, {}]", '{{"bbox_2d": [0, 0, 9, {}]}}'):
        assert number("box", endless.format("9" * 400), wanted) == 0


def test_corpus_metrics_are_those_of_the_whole_set():
    sacrebleu = pytest.importorskip("sacrebleu")
    samples = [
        Scored("the cat is on the mat", ["the cat sat on the mat", "a cat is on the mat"]),
        Scored("two dogs run in the snow", ["two dogs are running in the snow"]),
    ]
    overall = {name: scored(name, samples)[0][name] for name in ("bleu", "chrf")}
    answers = [each.answer for each in samples]
    references = [
        ["the cat sat on the mat", samples[1].references[0]],
        [samples[0].references[1], None],
    ]
    assert overall["bleu"] == sacrebleu.corpus_bleu(answers, references).score
    assert overall["chrf"] == sacrebleu.corpus_chrf(answers, references).score
    mean = sum(scored("bleu", [each])[0]["bleu"] for each in samples) / 2
    assert overall["bleu"] != pytest.approx(mean)
    assert number("bleu_zh", "门是红色的。", "门是红色的。") == pytest.approx(100)


def test_rouge_is_that_of_rouge_score():
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    answer, reference = "Two dogs -- not 3 -- run in Café No. 7", "two dogs run at cafe no 7"
    wanted = scorer.score(reference, answer)["rougeL"].fmeasure
    assert number("rouge_l", answer, reference) == wanted
    # A sign of a script without spaces is a word.
    assert number("rouge_l", "红色的门", "红门") == pytest.approx(2 / 3)


USER = """
from __future__ import annotations
MOST = "most"

def length(answer, references, row):
    return {"letters": len(answer), "share": len(answer) / row[MOST]}

def order(answers, references, rows):
    return float(answers == sorted(answers))

def text(answer, references, row):
    return "good"

def odd(answer):
    return 1
"""


def test_functions_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(USER)
    rows = {"most": 4}
    samples = [Scored("ab", ["a"], rows), Scored("b", ["a"], rows)]
    overall, own = scored(f"{file}:length", samples)
    assert overall == {"letters": 1.5, "share": 0.375}
    assert own[1] == {"letters": 1, "share": 0.25}
    assert scored(f"{file}:order", samples) == ({"order": 1}, [{}, {}])
    sample = Scored("", ["no"], rows)
    for name, message in {
        f"{file}:text": "returned 'good': it must return a finite number",
        f"{file}:odd": r"takes answer: write it as odd\(answer, references, row\)",
        f"{file}:none": "has no function 'none': check the name",
        f"{tmp_path}/other.py:f": "there is no file .*other.py: check the path",
        "blue": "no metric 'blue': use one of exact_match, anls",
        "box": r"the reference 'no' is no box: write \[x1",
        "multiple_choice": "the reference 'no' of multiple choice is no letter or op",
    }.items():
        with pytest.raises(ValueError, match=message):
            scored(name, [sample])


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu", None)
    with pytest.raises(
        ValueError, match=r"bleu needs sacrebleu: pip install 'paddle-vl\[metrics\]'"
    ):
        metric_named("bleu")


def test_the_page_has_every_metric():
    with pytest.raises(ValueError, match="use one of ") as refused:
        metric_named("?")
    names = re.search("use one of (.*), or a function", str(refused.value))[1].split(", ")
    page = (Path(__file__).parents[4] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    assert [name for name in names if f"`{name}`" not in page] == []
