"""Metrics of documents: numbers of their definitions, and of the implementations that papers use.

`tests/data/documents/teds.jsonl` has numbers of PubTabNet's TEDS after OmniDocBench's
normalisation, as its package 0.1.0 has both; its tables were drawn at random.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from paddle_vl.config.guard_settings import LOWER_IS_BETTER
from paddle_vl.families.vlm.evaluation.document_metrics import table_similarity
from paddle_vl.families.vlm.evaluation.edit_distance import Tree, edit_distance, tree_edit_distance
from paddle_vl.families.vlm.evaluation.metrics import Scored, metric_named

DATA = Path(__file__).parents[3] / "data" / "documents"
LOC = "".join(f"<|LOC_{value}|>" for value in (100, 100, 300, 100, 300, 200, 100, 200))
# Moved by half of its width: an IoU of a third.
FAR = "".join(f"<|LOC_{value}|>" for value in (200, 100, 400, 100, 400, 200, 200, 200))
# The same corners, crossed.
CROSSED = "".join(f"<|LOC_{value}|>" for value in (300, 200, 100, 100, 100, 200, 300, 100))
ROW = "<table><tr><td>{}</td><td>{}</td></tr></table>"


def scored(name: str, *samples: tuple) -> dict[str, float]:
    """Scores of answers, each with its references."""
    metric, given = metric_named(name), [Scored(answer, each) for answer, *each in samples]
    return metric.score(given, [metric.own(each) for each in given])


@pytest.mark.parametrize(
    ("metric", "answer", "references", "wanted"),
    [
        ("cer", "kitten", ["sitting"], 3 / 7),
        ("cer", "two\nlines  here", ["two lines here"], 0),
        ("cer", "aaaa", ["b"], 4),
        ("cer", "", ["ab"], 1),
        # One edit is less of four letters than of two.
        ("cer", "abcd", ["ab", "abce"], 1 / 4),
        ("wer", "the cat sat", ["the bat sat down"], 2 / 4),
        ("ned", "kitten", ["sitting"], 3 / 7),
        ("ned", "aaaa", ["b"], 1),
        ("ned", "", [""], 0),
        ("ned_letters", "Total: 1.5 EUR", ["Total 15 EUR."], 0),
        ("ned_letters", "漢,字", ["漢 字"], 0),
        ("formula", r"\[ \frac{a}{b} \]", [r"$$\frac{a}{b}.$$"], 0),
        ("formula", r"\left( \mathrm{d}x \right)", [r"({D}x)"], 0),
        ("formula", r"a\leftarrow b \tag{3}", [r"a \leftarrow b"], 0),
        ("formula", r"a\leftarrow b", [r"a b"], 10 / 12),
        ("formula", r"\begin{matrix}a\\[2pt]b\end{matrix}", [r"a\\[2pt]b"], 0),
        ("teds", ROW.format("a", "b"), ["<fcel>a<fcel>b<nl>"], 1),
        ("teds", ROW.format("a", "bb"), [ROW.format("a", "bc")], 1 - 0.5 / 3),
        ("teds", ROW.format("a", "\uff11"), [ROW.format("a", "1")], 1),
        ("teds", ROW.replace("td", "th").format("a", "b"), [ROW.format("a", "b")], 1),
        ("teds_s", ROW.format("a", "b"), [ROW.format("c", "d")], 1),
        ("teds_s", "<fcel>a<lcel><nl>", [ROW.format("c", "d")], 1 - 2 / 3),
        # A row without its last cell is filled.
        ("teds", "<fcel>a<fcel>b<nl><fcel>c<nl>", ["<fcel>a<fcel>b<nl><fcel>c<ecel><nl>"], 1),
        ("teds", "There is no table.", [ROW.format("a", "b")], 0),
        ("teds", "", [ROW.format("a", "b")], 0),
        ("teds", '<table><tr><td colspan="9999" rowspan="9999">a', [ROW.format("a", "b")], 0),
        ("spotting_f1", f"Total{LOC}\nSum{LOC}", [f"total{LOC}"], 2 / 3),
        ("spotting_f1", f"Total{FAR}", [f"Total{LOC}"], 0),
        ("spotting_f1", f"Total{CROSSED}", [f"Total{LOC}"], 1),
        ("spotting_f1", f"Sum{LOC}", [f"Total{LOC}"], 0),
        ("spotting_f1", f"Total{LOC}\nTotal{LOC}", [f"Total{LOC}"], 2 / 3),
        ("spotting_f1", "nothing", [f"Total{LOC}"], 0),
        ("spotting_f1", f"Total{'<|LOC_5|>' * 8}", [f"Total{LOC}"], 0),
    ],
)
def test_numbers_of_an_answer(metric, answer, references, wanted):
    assert next(iter(scored(metric, (answer, *references)).values())) == pytest.approx(wanted)


def test_rates_of_many_answers_are_all_errors_over_all_letters():
    answers = [("a", "b"), ("abcdefghi", "abcdefghi")]
    assert scored("cer", *answers) == {"cer": 1 / 10}
    assert scored("wer", *answers, ("two words", "two swords")) == {"wer": 2 / 4}
    found = scored("spotting_f1", (f"A{LOC}\nB{FAR}", f"A{LOC}"), (f"C{LOC}", f"C{LOC}\nD{FAR}"))
    assert found == {
        "spotting_f1": 4 / 6,
        "spotting_precision": 2 / 3,
        "spotting_recall": 2 / 3,
    }


@pytest.mark.parametrize(
    ("metric", "reference", "told"),
    [
        ("cer", "", "an error rate is a share of it: use ned"),
        ("wer", "  ", "an error rate is a share of it: use ned"),
        ("teds", "no table", "the reference 'no table' is no table: write OTSL or HTML"),
        ("teds_s", "<table></table>", "is no table"),
        ("spotting_f1", "Total", "line 1 has 0 location tokens"),
    ],
)
def test_a_reference_that_nothing_can_be_compared_with_is_refused(metric, reference, told):
    with pytest.raises(ValueError, match=told):
        scored(metric, (reference, reference))


def test_tables_score_as_with_the_implementations_of_papers():
    lines = (DATA / "teds.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 12
    for line in map(json.loads, lines):
        found = [
            table_similarity(line["answer"], line["reference"], has_text=has_text)
            for has_text in (True, False)
        ]
        assert found == pytest.approx([line["teds"], line["teds_s"]], abs=1e-12)


def plain_distance(one: str, other: str) -> int:
    table = np.add.outer(np.arange(len(one) + 1), np.arange(len(other) + 1))
    for i, a in enumerate(one, 1):
        for j, b in enumerate(other, 1):
            steps = table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + (a != b)
            table[i, j] = min(steps)
    return int(table[-1, -1])


def test_distances_are_those_of_their_recursions():
    rng = np.random.default_rng(0)
    for _ in range(200):
        one, other = ("".join(rng.choice([*"abcd"], rng.integers(0, 80))) for _ in range(2))
        assert edit_distance(one, other) == plain_distance(one, other)
        # Of a tree whose root has these below it in order, what is not the root is a sequence.
        trees = [Tree("root", [*map(Tree, text)]) for text in (one, other)]
        distance = tree_edit_distance(trees[0], trees[1], lambda a, b: float(a != b))
        assert distance == edit_distance(one, other)
    # A node that is left out gives its place to those below it.
    leaves = [Tree("x"), Tree("y")]
    inner = Tree("root", [Tree("inner", leaves)])
    assert tree_edit_distance(inner, Tree("root", leaves), lambda a, b: 2.0 * (a != b)) == 1


def test_which_numbers_are_lower_for_a_better_model():
    for name in LOWER_IS_BETTER - {"loss", "perplexity"}:
        assert scored(name, ("right", "right")) == {name: 0}
    assert scored("exact_match", ("right", "right")) == {"exact_match": 1}
