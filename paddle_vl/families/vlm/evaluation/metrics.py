"""Scores of answers in text: a table of metrics, and functions of a user's own file.

A metric gives named numbers for a sample: from its answer, one or several references, and the row.
Of a set of samples the score is the mean of each number; of a rate it is all errors over all that
they are of; of BLEU and chrF, and of a function over lists, it is what the whole set gives.
"""

import inspect
import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple

from paddle_vl.data.formats.keys import from_text
from paddle_vl.data.media_file import brief
from paddle_vl.families.vlm.evaluation.document_metrics import (
    Rate,
    character_errors,
    formula_distance,
    letters_distance,
    normalised_distance,
    spotting_rates,
    table_similarity,
    word_errors,
)
from paddle_vl.families.vlm.evaluation.edit_distance import edit_distance
from paddle_vl.families.vlm.evaluation.grounding_metrics import box_scores, points_right
from paddle_vl.families.vlm.evaluation.page_checks import passes

Numbers = dict[str, float]


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
    if distance := _DISTANCES.get(name):
        return _each(name, lambda s: min(distance(s.answer, each) for each in s.references))
    if rates := _RATES.get(name):
        return _pooled(rates)
    if of_sample := _OF_SAMPLE.get(name):
        return _each(name, of_sample)
    if name not in _OF_PACKAGES:
        known = ", ".join([*_NEAREST, *_DISTANCES, *_RATES, *_OF_SAMPLE, *_OF_PACKAGES])
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


def _pooled(rates: Callable[[Scored], Mapping[str, Rate]]) -> Metric:
    """The metric whose scores are sums over sums."""

    def ratio(name: str, found: Sequence[Mapping[str, Rate]]) -> float:
        part, whole = (math.fsum(each[name][place] for each in found) for place in (0, 1))
        return part / whole if whole else 0.0

    def score(samples: Sequence[Scored]) -> Numbers:
        found = [*map(rates, samples)]
        return {name: ratio(name, found) for name in found[0]}

    return Metric(lambda sample: score([sample]), lambda samples, _: score(samples))


def _error_rate(name: str, errors: Callable[[str, str], Rate]) -> Callable[[Scored], Any]:
    """Errors of the nearest reference."""

    def nearest(sample: Scored) -> Mapping[str, Rate]:
        found = [errors(sample.answer, each) for each in sample.references]
        return {name: min(found, key=lambda rate: rate[0] / rate[1])}

    return nearest


def _spotting(sample: Scored) -> Mapping[str, Rate]:
    found = [spotting_rates(sample.answer, each) for each in sample.references]
    return max(found, key=lambda rates: rates["spotting_f1"][0] / rates["spotting_f1"][1])


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
    similarity = 1 - edit_distance(answer, reference) / longest
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


# Compare an answer with one reference; the nearest counts.
_NEAREST: dict[str, Callable[[str, str], float]] = {
    "exact_match": lambda answer, reference: answer == reference,
    "anls": _anls,
    "relaxed_accuracy": _relaxed,
    "teds": table_similarity,
    "teds_s": partial(table_similarity, has_text=False),
}
# Of these the nearest has the least.
_DISTANCES: dict[str, Callable[[str, str], float]] = {
    "ned": normalised_distance,
    "ned_letters": letters_distance,
    "formula": formula_distance,
}
_RATES: dict[str, Callable[[Scored], Mapping[str, Rate]]] = {
    "cer": _error_rate("cer", character_errors),
    "wer": _error_rate("wer", word_errors),
    "spotting_f1": _spotting,
}
_OF_SAMPLE: dict[str, Callable[[Scored], Any]] = {
    "multiple_choice": _multiple_choice,
    "mmmu": _mmmu,
    "box": lambda sample: box_scores(sample.answer, sample.references),
    "olmocr": lambda sample: passes(sample.answer, sample.row),
    "pointing": lambda sample: points_right(sample.answer, sample.references),
}
_OF_PACKAGES: dict[str, Callable[[str], Metric]] = {
    "rouge_l": _rouge,
    "bleu": partial(_corpus, function="corpus_bleu"),
    "bleu_zh": partial(_corpus, function="corpus_bleu", tokenize="zh"),
    "chrf": partial(_corpus, function="corpus_chrf"),
}
