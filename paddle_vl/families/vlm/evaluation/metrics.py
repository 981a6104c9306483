"""Scores of answers in text: a table of metrics, and functions of a user's own file.

A metric gives named numbers for a sample: from its answer, one or several references, and the row.
Of a set of samples the score is the mean of each number; of BLEU and chrF, and of a function over
lists, it is what the whole set gives.
"""

import inspect
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple

from paddle_vl.data.formats.grounding import boxes_in
from paddle_vl.data.formats.keys import from_text
from paddle_vl.data.media_file import brief

Numbers = dict[str, float]
# Two corners of a box, or a point, in thousandths of the image.
Shape = tuple[float, ...]


class Scored(NamedTuple):
    """An answer with what it is compared with, all without reasoning and outer spaces.

    Attributes:
        references: right answers, at least one.
        row: the row's other values, such as `options` of multiple choice.
    """

    answer: str
    references: Sequence[str]
    row: Mapping[str, Any] = {}


class Metric(NamedTuple):
    """A way to score samples.

    Attributes:
        own: numbers of a sample by name; empty where a sample alone has none.
        score: numbers of a set, from its samples in order and the numbers of each.
    """

    own: Callable[[Scored], Numbers]
    score: Callable[[Sequence[Scored], Sequence[Numbers]], Numbers]


def conclusion(text: str) -> str:
    """What follows the reasoning of an answer, without outer spaces."""
    return text.rpartition("</think>")[2].strip()


def metric_named(name: str) -> Metric:
    """A metric of the tables, or `file.py:function`.

    Raises:
        ValueError: there is none of that name, its package is not installed, or the file has no
            such function, or one of other arguments; in a call: a reference is nothing that the
            metric can use, or a function returns something else than numbers.
    """
    if ".py:" in name:
        return _user_metric(name)
    if compare := _NEAREST.get(name):
        return _each(name, lambda s: max(compare(s.answer, each) for each in s.references))
    if of_sample := _OF_SAMPLE.get(name):
        return _each(name, of_sample)
    if name not in _OF_PACKAGES:
        known = ", ".join([*_NEAREST, *_OF_SAMPLE, *_OF_PACKAGES])
        raise ValueError(
            f"there is no metric {name!r}: use one of {known}, or a function of your own, "
            "file.py:function"
        )
    try:
        return _OF_PACKAGES[name](name)
    except ImportError as error:
        needed = f"{error.name}: pip install 'paddle-vl[metrics]'"
        raise ValueError(f"metric {name} needs {needed}") from error


def _user_metric(name: str) -> Metric:
    file, _, function = name.rpartition(":")
    if not Path(file).is_file():
        raise ValueError(f"metric {name}: there is no file {file}: check the path")
    found = run_path(file).get(function)
    if not callable(found):
        raise ValueError(f"metric {name}: {file} has no function {function!r}: check the name")
    arguments = [*inspect.signature(found).parameters]
    if arguments == ["answer", "references", "row"]:
        return _each(name, lambda sample: found(*sample))
    if arguments == ["answers", "references", "rows"]:
        return _whole(name, lambda samples: found(*map(list, zip(*samples, strict=True))))
    raise ValueError(
        f"metric {name} takes {', '.join(arguments) or 'nothing'}: write it as {function}(answer, "
        f"references, row) for one sample, or {function}(answers, references, rows) for all"
    )


def _each(name: str, of_sample: Callable[[Scored], Any]) -> Metric:
    """The metric whose score is the mean over samples."""

    def mean(_: Sequence[Scored], own: Sequence[Numbers]) -> Numbers:
        for numbers in own:
            if numbers.keys() != own[0].keys():
                raise ValueError(
                    f"metric {name} gives {[*numbers]}, and before {[*own[0]]}: it must give the "
                    "same names for each answer"
                )
        return {n: math.fsum(each[n] for each in own) / len(own) for n in own[0]}

    return Metric(lambda sample: _numbers(name, of_sample(sample)), mean)


def _whole(name: str, of_all: Callable[[Sequence[Scored]], Any]) -> Metric:
    """The metric of whole sets, in the order of the samples."""
    return Metric(lambda _: {}, lambda samples, _: _numbers(name, of_all(samples)))


def _numbers(name: str, value: Any) -> Numbers:
    """What a metric returned, by name; a single number has the metric's."""
    named = value if isinstance(value, Mapping) else {name.rpartition(":")[2]: value}
    try:
        numbers = {key: float(each) for key, each in named.items() if isinstance(key, str)}
    except (TypeError, ValueError):
        numbers = {}
    if len(numbers) != len(named) or not all(map(math.isfinite, numbers.values())):
        raise ValueError(
            f"metric {name} returned {brief(value)!r}: it must return a finite number, or a "
            "mapping of names to finite numbers"
        )
    return numbers


def _anls(answer: str, reference: str) -> float:
    """1 less the edit distance over the longer length; 0 up to one half. Without regard to case and
    to the width of spaces."""
    answer, reference = (" ".join(text.lower().split()) for text in (answer, reference))
    longest = max(len(answer), len(reference))
    if answer == reference or 2 * abs(len(answer) - len(reference)) >= longest:
        return float(answer == reference)
    distances = list(range(len(reference) + 1))
    for row, letter in enumerate(answer, start=1):
        before, distances[0] = distances[0], row
        for column, other in enumerate(reference, start=1):
            kept = before + (letter != other)
            before = distances[column]
            distances[column] = min(before + 1, distances[column - 1] + 1, kept)
    similarity = 1 - distances[-1] / longest
    return similarity if similarity > 0.5 else 0.0


def _relaxed(answer: str, reference: str) -> bool:
    """ChartQA's: a number within 5 percent, else the same text without regard to case."""
    found, wanted = _as_number(answer), _as_number(reference)
    if found is not None and wanted:
        return abs(found - wanted) <= 0.05 * abs(wanted)
    return answer.lower() == reference.lower()


def _as_number(text: str) -> float | None:
    """A number, of percent a fraction."""
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


class _Words:
    """Words of Latin letters and digits, as rouge-score's; signs of scripts without spaces."""

    def tokenize(self, text: str) -> list[str]:
        return re.findall(r"[a-z0-9]+|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]", text.lower())


def _rouge(name: str) -> Metric:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], tokenizer=_Words())
    return _each(name, lambda s: scorer.score_multi(s.references, s.answer)["rougeL"].fmeasure)


def _corpus(name: str, function: str, **settings: Any) -> Metric:
    """A metric of sacrebleu, of 0 to 100."""
    import sacrebleu

    compute = getattr(sacrebleu, function)

    def of_all(samples: Sequence[Scored]) -> float:
        # None where a sample has fewer references than others.
        references = map(list, zip_longest(*(each.references for each in samples)))
        return compute([each.answer for each in samples], [*references], **settings).score

    return _whole(name, of_all)


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
    listed = from_text(row.get("options"), literal=True)
    if isinstance(listed, list | tuple):
        return dict(zip(string.ascii_uppercase, map(str, listed), strict=False))
    return {letter: str(row[letter]) for letter in string.ascii_uppercase if row.get(letter)}


def choice_of(answer: str, options: Mapping[str, str]) -> str | None:
    """The letter that an answer in free text chooses, by its name or by the option's text.

    Args:
        options: texts by letter; empty if they are not known.
    """
    by_text = {plain: letter for letter, text in options.items() if (plain := _plain(text))}
    allowed, plain = options or string.ascii_uppercase, _plain(answer)
    if plain in by_text and plain.upper() not in options:
        return by_text[plain]
    for pattern in _CHOICES:
        if found := [each for each in re.findall(pattern, answer) if each.upper() in allowed]:
            return found[-1].upper()
    # The last text of an option, and of several that end there the longest.
    ends = [
        (match.end(), len(text), letter)
        for text, letter in by_text.items()
        for match in re.finditer(rf"(?<!\w){re.escape(text)}(?!\w)", plain)
    ]
    lone = [each for each in re.findall(_LONE, answer) if each in allowed]
    return max(ends)[2] if ends else lone[-1] if lone else None


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).strip(". ")


def _multiple_choice(sample: Scored) -> bool:
    options = options_of(sample.row)
    wanted = {choice_of(each, options) for each in sample.references}
    if None in wanted:
        raise ValueError(
            f"the reference {sample.references[0]!r:.80} of multiple choice is no letter or option "
            f"({', '.join(options.values()) or 'the row has no options'}): give letters"
        )
    return choice_of(sample.answer, options) in wanted


_NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"


def _mmmu(sample: Scored) -> bool:
    """Multiple choice where the row has options; else whether the answer has a reference as words,
    or a number that is equal to two decimals."""
    if options_of(sample.row):
        return _multiple_choice(sample)
    return any(_has(sample.answer, each) for each in sample.references)


def _has(answer: str, reference: str) -> bool:
    if re.fullmatch(_NUMBER, reference):
        wanted, *found = (
            round(float(each.replace(",", "")), 2)
            for each in (reference, *re.findall(_NUMBER, answer))
        )
        return wanted in found
    return re.search(rf"(?i)(?<!\w){re.escape(reference)}(?!\w)", answer) is not None


# Thousandths of the image that a point may be away from the reference's.
_POINT_DISTANCE = 50.0


def _shapes(text: str) -> list[Shape]:
    # A point alone may have lost its markers.
    return [box.corners for box in boxes_in(re.sub(r"\A\(([^()]*)\)\Z", r"[\1]", text))]


def _wanted_shapes(reference: str, kinds: Mapping[int, str]) -> list[Shape]:
    found = _shapes(reference)
    if not found or any(len(each) not in kinds for each in found):
        raise ValueError(
            f"the reference {reference!r:.80} is no {' or '.join(kinds.values())}: write "
            "[x1, y1, x2, y2] in thousandths of the image"
        )
    return found


def _iou(first: Shape, second: Shape) -> float:
    (ax, ay, bx, by), (cx, cy, dx, dy) = first, second
    inner = max(0.0, min(bx, dx) - max(ax, cx)) * max(0.0, min(by, dy) - max(ay, cy))
    union = max(0.0, bx - ax) * max(0.0, by - ay) + max(0.0, dx - cx) * max(0.0, dy - cy) - inner
    return inner / union if union > 0 else 0.0


def _paired_ious(found: Sequence[Shape], wanted: Sequence[Shape]) -> list[float]:
    """IoU of each pair, the nearest first; 0 for a box without a partner."""
    ious, partners = list[float](), dict[int, int]()
    pairs = product(enumerate(found), enumerate(wanted))
    for iou, own, other in sorted(((_iou(a, b), i, j) for (i, a), (j, b) in pairs), reverse=True):
        if own not in partners and other not in partners.values():
            partners[own] = other
            ious.append(iou)
    return ious + [0.0] * abs(len(found) - len(wanted))


def _box(sample: Scored) -> Numbers:
    """Mean IoU of boxes, paired with the nearest pair first, and the share of the answer's with an
    IoU of a threshold or more; of the nearest reference."""
    found = [each for each in _shapes(sample.answer) if len(each) == 4]
    of_references = (
        _paired_ious(found, _wanted_shapes(each, {4: "box"})) for each in sample.references
    )
    best = max(of_references, key=lambda ious: sum(ious) / len(ious))
    shares = {
        f"box_precision_{least}": sum(iou >= least for iou in best) / max(len(found), 1)
        for least in (0.5, 0.7, 0.9)
    }
    return {"box_iou": sum(best) / len(best), **shares}


def _pointing(sample: Scored) -> bool:
    """Whether the answer's first point, or the middle of its first box, is in a box of a reference,
    or near a point of it."""
    kinds = {4: "box", 2: "point"}
    wanted = [each for text in sample.references for each in _wanted_shapes(text, kinds)]
    if not (found := _shapes(sample.answer)):
        return False
    x, y = (sum(found[0][axis::2]) / len(found[0][axis::2]) for axis in (0, 1))
    return any(
        math.dist(shape, (x, y)) <= _POINT_DISTANCE
        if len(shape) == 2
        else shape[0] <= x <= shape[2] and shape[1] <= y <= shape[3]
        for shape in wanted
    )


# Compare an answer with one reference; the nearest counts.
_NEAREST: dict[str, Callable[[str, str], float]] = {
    "exact_match": lambda answer, reference: answer == reference,
    "anls": _anls,
    "relaxed_accuracy": _relaxed,
}
_OF_SAMPLE: dict[str, Callable[[Scored], Any]] = {
    "multiple_choice": _multiple_choice,
    "mmmu": _mmmu,
    "box": _box,
    "pointing": _pointing,
}
_OF_PACKAGES: dict[str, Callable[[str], Metric]] = {
    "rouge_l": _rouge,
    "bleu": partial(_corpus, function="corpus_bleu"),
    "bleu_zh": partial(_corpus, function="corpus_bleu", tokenize="zh"),
    "chrf": partial(_corpus, function="corpus_chrf"),
}
