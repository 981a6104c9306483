"""Scores of answers in text: a table of metrics, and functions of a user's own file.

A metric gives named numbers for a sample: from its answer, one or several references, and the row.
Of a set of samples the score is the mean of each number; of BLEU and chrF, and of a function over
lists, it is what the whole set gives. Reasoning in front of an answer is not scored.

Over 350 lines: one metric after the other, and the table of them.
"""

import inspect
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple

from paddle_vl.data.formats.grounding import boxes_in
from paddle_vl.data.formats.keys import from_text
from paddle_vl.data.media_file import brief


class Scored(NamedTuple):
    """An answer with what it is compared with.

    Attributes:
        references: right answers, at least one.
        row: the row's other values, such as `options` of multiple choice.
    """

    answer: str
    references: Sequence[str]
    row: Mapping[str, Any] = {}


class Metric(NamedTuple):
    """A metric: one of two functions that give numbers by name.

    Attributes:
        of_sample: of a sample; a set of samples has the mean of each number.
        of_all: of a set of samples.
    """

    name: str
    of_sample: Callable[[Scored], Any] | None = None
    of_all: Callable[[Sequence[Scored]], Any] | None = None


def conclusion(text: str) -> str:
    """What follows the reasoning of an answer, without outer spaces."""
    return text.rpartition("</think>")[2].strip()


def metric_named(name: str) -> Metric:
    """A metric of the table, or `file.py:function`.

    Raises:
        ValueError: there is none of that name, its package is not installed, or the file has no
            such function, or one of other arguments.
    """
    if ".py:" in name:
        return _user_metric(name)
    if name not in METRICS:
        raise ValueError(
            f"there is no metric {name!r}: use one of {', '.join(METRICS)}, or a function of your "
            "own, file.py:function"
        )
    try:
        return METRICS[name](name)
    except ImportError as error:
        raise ValueError(
            f"metric {name} needs {error.name}: pip install 'paddle-vl[metrics]'"
        ) from error


def score(
    metric: Metric, samples: Sequence[Scored]
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Numbers of a set of samples, and of each of them.

    Args:
        samples: of all ranks, in one order; at least one.

    Raises:
        ValueError: a reference is nothing that the metric can use, or a function returns something
            else than numbers.
    """
    samples = [
        Scored(conclusion(each.answer), [*map(conclusion, each.references)], each.row)
        for each in samples
    ]
    if metric.of_sample is None:
        assert metric.of_all is not None, "has one of them"
        return _numbers(metric, metric.of_all(samples)), [{} for _ in samples]
    own = [_numbers(metric, metric.of_sample(each)) for each in samples]
    for numbers in own:
        if numbers.keys() != own[0].keys():
            raise ValueError(f"metric {metric.name} gives {[*numbers]}, and before {[*own[0]]}")
    return {n: math.fsum(each[n] for each in own) / len(own) for n in own[0]}, own


def _numbers(metric: Metric, value: Any) -> dict[str, float]:
    """The numbers that a metric returned; a single one has the metric's name."""
    named = value if isinstance(value, Mapping) else {metric.name.rpartition(":")[2]: value}
    try:
        numbers = {name: float(each) for name, each in named.items() if isinstance(name, str)}
    except (TypeError, ValueError):
        numbers = {}
    if len(numbers) != len(named) or not all(map(math.isfinite, numbers.values())):
        raise ValueError(
            f"metric {metric.name} returned {brief(value)!r}: it must return a finite number, or a "
            "mapping of names to finite numbers"
        )
    return numbers


def _user_metric(name: str) -> Metric:
    file, _, function = name.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"metric {name}: there is no file {file}: check the path")
    found = run_path(file).get(function)
    if not callable(found):
        raise ValueError(f"metric {name}: {file} has no function {function!r}: check the name")
    arguments = [*inspect.signature(found).parameters]
    if arguments == ["answer", "references", "row"]:
        return Metric(name, lambda sample: found(*sample))
    if arguments == ["answers", "references", "rows"]:
        # Called with lists, in the order of the samples.
        return Metric(name, of_all=lambda samples: found(*map(list, zip(*samples, strict=True))))
    raise ValueError(
        f"metric {name} takes {', '.join(arguments) or 'nothing'}: write it as {function}(answer, "
        f"references, row) for one sample, or {function}(answers, references, rows) for all"
    )


def _best(compare: Callable[[str, str], float], name: str) -> Metric:
    """A metric of the reference that is nearest."""
    return Metric(name, lambda s: {name: max(compare(s.answer, each) for each in s.references)})


def _exact(answer: str, reference: str) -> float:
    return float(answer == reference)


def _anls(answer: str, reference: str) -> float:
    """1 less the edit distance over the longer length; 0 below one half. Without regard to case and
    to the width of spaces."""
    answer, reference = (" ".join(text.lower().split()) for text in (answer, reference))
    longest = max(len(answer), len(reference))
    if not longest:
        return 1.0
    if 2 * abs(len(answer) - len(reference)) >= longest:
        return 0.0
    distances = list(range(len(reference) + 1))
    for row, letter in enumerate(answer, start=1):
        before, distances[0] = distances[0], row
        for column, other in enumerate(reference, start=1):
            least = min(
                distances[column] + 1, distances[column - 1] + 1, before + (letter != other)
            )
            before, distances[column] = distances[column], least
    similarity = 1 - distances[-1] / longest
    return similarity if similarity > 0.5 else 0.0


def _relaxed(answer: str, reference: str) -> float:
    """ChartQA's: a number within 5 percent, else the same text without regard to case."""
    found, wanted = _as_number(answer), _as_number(reference)
    if found is not None and wanted:
        return float(abs(found - wanted) <= 0.05 * abs(wanted))
    return float(answer.lower() == reference.lower())


def _as_number(text: str) -> float | None:
    """A number, of percent a fraction."""
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


# Words of Latin letters and digits, as rouge-score has them; signs of scripts without spaces.
_WORD = re.compile(r"[a-z0-9]+|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


class _Words:
    def tokenize(self, text: str) -> list[str]:
        return _WORD.findall(text.lower())


def _rouge(name: str) -> Metric:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], tokenizer=_Words())
    return _best(lambda answer, each: scorer.score(each, answer)["rougeL"].fmeasure, name)


def _corpus(name: str, function: str, **settings: Any) -> Metric:
    """A metric of sacrebleu, of 0 to 100."""
    import sacrebleu

    compute = getattr(sacrebleu, function)

    def of_all(samples: Sequence[Scored]) -> dict[str, float]:
        # None where a sample has fewer references than others.
        references = map(list, zip_longest(*(each.references for each in samples)))
        answers = [each.answer for each in samples]
        return {name: compute(answers, [*references], **settings).score}

    return Metric(name, of_all=of_all)


_ONE = r"(A(?!\s+[a-z])|[B-Z])(?![\w'])"
# How free text names its choice; the last of the first kind that occurs counts. A and I are words.
_CHOICES = (
    r"\A\W*([A-Za-z])\W*\Z",
    rf"(?i:answer|choice|option)(?i:\s+is)?[\W_]*{_ONE}",
    r"\A\W*([A-Z])(?:[.:),]|\n)",
    r"\(([A-Z])\)",
    r"(?<![\w'])([A-Z])[:)](?:\s|\Z)",
)
_LONE = rf"(?<![\w'])(?!I){_ONE}"


def options_of(row: Mapping[str, Any]) -> dict[str, str]:
    """The options of a row by letter: a list, also as text, or columns A, B and so on."""
    listed = from_text(row.get("options") or row.get("choices"), literal=True)
    if isinstance(listed, Mapping):
        return {str(letter): str(text) for letter, text in listed.items()}
    if isinstance(listed, list | tuple):
        return dict(zip(string.ascii_uppercase, map(str, listed), strict=False))
    return {letter: str(row[letter]) for letter in string.ascii_uppercase if row.get(letter)}


def choice_of(answer: str, options: Mapping[str, str]) -> str | None:
    """The letter that an answer in free text chooses, by its name or by the option's text.

    Args:
        options: texts by letter; empty if they are not known.
    """
    by_text = {_plain(text): letter for letter, text in options.items()}
    allowed, plain = options or string.ascii_uppercase, _plain(answer)
    if plain in by_text and plain.upper() not in options:
        return by_text[plain]
    ends = [
        (match.end(), len(text), letter)
        for text, letter in by_text.items()
        for match in re.finditer(rf"(?<!\w){re.escape(text)}(?!\w)", plain)
        if text
    ]
    for pattern in (*_CHOICES, _LONE):
        # The text of an option counts more than a letter that may be a word; a longer text more
        # than one within it.
        if pattern is _LONE and ends:
            return max(ends)[2]
        if found := [each for each in re.findall(pattern, answer) if each.upper() in allowed]:
            return found[-1].upper()
    return None


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).strip(". ")


def _multiple_choice(name: str, sample: Scored) -> dict[str, float]:
    options = options_of(sample.row)
    wanted = {choice_of(each, options) for each in sample.references}
    if None in wanted:
        raise ValueError(
            f"metric {name}: the reference {sample.references[0]!r:.80} is no letter or option "
            f"({', '.join(options.values()) or 'the row has no options'}): give letters"
        )
    return {name: float(choice_of(sample.answer, options) in wanted)}


_NUMBER = r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?|-?\d*\.?\d+(?:e[+-]?\d+)?"
_SIGNS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")


def _mmmu(name: str, sample: Scored) -> dict[str, float]:
    """MMMU's: multiple choice where the row has options; else a reference within what the answer
    concludes, or a number in it that is equal to two decimals."""
    if options_of(sample.row):
        return _multiple_choice(name, sample)
    lines = sample.answer.lower().strip(" .").split("\n")
    ends = []
    for line in lines:
        signs = (*_SIGNS, "=") if line is lines[-1] else _SIGNS
        tails = [line.rpartition(sign)[2].strip() for sign in signs if sign in line]
        ends += [tail for tail in [min(tails, key=len, default="")] if tail.strip(" :,.!?;'")]
    ends = ends or [" ".join(lines)]
    numbers = {_rounded(each) for end in ends for each in re.findall(_NUMBER, end)}
    for reference in sample.references:
        number, text = _rounded(reference), re.escape(reference.lower())
        # A single letter only as a word.
        part = rf"\b{text}\b" if len(reference) == 1 else text
        if number in numbers if number is not None else any(re.search(part, end) for end in ends):
            return {name: 1.0}
    return {name: 0.0}


def _rounded(text: str) -> float | None:
    number = _as_number(text.replace(",", ""))
    return None if number is None else round(number, 2)


_THRESHOLDS = (0.5, 0.7, 0.9)
# Thousandths of the image that a point may be away from the reference's.
_POINT_DISTANCE = 50.0


def _shapes(text: str) -> list[tuple[float, ...]]:
    """Boxes of two corners, and points, in thousandths of the image."""
    # A point alone, without its markers.
    return [box.corners for box in boxes_in(re.sub(r"\A\(([^()]*)\)\Z", r"[\1]", text))]


def _wanted_shapes(name: str, reference: str, sizes: Sequence[int]) -> list[tuple[float, ...]]:
    found = _shapes(reference)
    if not found or any(len(each) not in sizes for each in found):
        kind = "box or point" if 2 in sizes else "box"
        raise ValueError(
            f"metric {name}: the reference {reference!r:.80} is no {kind}: write [x1, y1, x2, y2] "
            "in thousandths of the image"
        )
    return found


def _iou(first: Sequence[float], second: Sequence[float]) -> float:
    (ax, ay, bx, by), (cx, cy, dx, dy) = first, second
    inner = max(0.0, min(bx, dx) - max(ax, cx)) * max(0.0, min(by, dy) - max(ay, cy))
    union = max(0.0, bx - ax) * max(0.0, by - ay) + max(0.0, dx - cx) * max(0.0, dy - cy) - inner
    return inner / union if union > 0 else float(tuple(first) == tuple(second))


def _box(name: str, sample: Scored) -> dict[str, float]:
    """Mean IoU of boxes that are matched one to one, the best first, and the share of the answer's
    with an IoU of a threshold or more; of the nearest reference."""
    found = [each for each in _shapes(sample.answer) if len(each) == 4]
    best: list[float] = []
    for reference in sample.references:
        wanted = _wanted_shapes(name, reference, [4])
        pairs = [(_iou(a, b), i, j) for i, a in enumerate(found) for j, b in enumerate(wanted)]
        matched = [0.0] * max(len(found), len(wanted))
        taken: set[tuple[str, int]] = set()
        for iou, i, j in sorted(pairs, reverse=True):
            if not taken & {("found", i), ("wanted", j)}:
                taken |= {("found", i), ("wanted", j)}
                matched[i] = iou
        best = max(best, matched, key=lambda each: sum(each) / len(each) if each else -1)
    shares = {
        f"{name}_precision_{least}": sum(iou >= least for iou in best) / max(len(found), 1)
        for least in _THRESHOLDS
    }
    return {f"{name}_iou": sum(best) / len(best), **shares}


def _pointing(name: str, sample: Scored) -> dict[str, float]:
    """Whether the answer's first point, or the middle of its first box, is in a box of a reference,
    or near a point of it."""
    wanted = [each for text in sample.references for each in _wanted_shapes(name, text, [2, 4])]
    if not (found := _shapes(sample.answer)):
        return {name: 0.0}
    x, y = (sum(found[0][axis::2]) / len(found[0][axis::2]) for axis in (0, 1))
    hits = (
        math.dist(shape, (x, y)) <= _POINT_DISTANCE
        if len(shape) == 2
        else shape[0] <= x <= shape[2] and shape[1] <= y <= shape[3]
        for shape in wanted
    )
    return {name: float(any(hits))}


def _of_row(compute: Callable[[str, Scored], dict[str, float]]) -> Callable[[str], Metric]:
    return lambda name: Metric(name, partial(compute, name))


# Each makes the metric of its name.
METRICS: dict[str, Callable[[str], Metric]] = {
    "exact_match": partial(_best, _exact),
    "anls": partial(_best, _anls),
    "rouge_l": cache(_rouge),
    "bleu": partial(_corpus, function="corpus_bleu"),
    "bleu_zh": partial(_corpus, function="corpus_bleu", tokenize="zh"),
    "chrf": partial(_corpus, function="corpus_chrf"),
    "multiple_choice": _of_row(_multiple_choice),
    "mmmu": _of_row(_mmmu),
    "relaxed_accuracy": partial(_best, _relaxed),
    "box": _of_row(_box),
    "pointing": _of_row(_pointing),
}
