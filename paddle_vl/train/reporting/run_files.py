"""Files that a run writes about itself, and how they are read: metrics.jsonl and run.json.

Readers need no Paddle: `paddle-vl report` and the launcher use them. `metrics` and `run_record`
list the keys.
"""

import json
import re
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

from paddle_vl.files.text_file import naming, read_json_object, shown, write_text

METRICS_FILE = "metrics.jsonl"
RUN_FILE = "run.json"
# Predicted and true actions of the last evaluation of a policy.
ACTIONS_FILE = "actions.json"
# Answers of a run's model beside the expected ones.
PREDICTIONS_FILE = "predictions.jsonl"
# Groups of sampled answers with their rewards, of the last report.
ROLLOUTS_FILE = "rollouts.jsonl"
EVAL_PREFIX = "eval_"
_REMEDY = "mend it, or move it away"
Line = dict[str, Any]


class MetricsFile:
    """A metrics.jsonl: one JSON object per line, each with its `step`."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, line: Line) -> None:
        with naming(self.path), self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, allow_nan=False) + "\n")

    def drop_after(self, step: int) -> None:
        """Remove the lines of steps after `step`, which a resumed run trains again."""
        kept = [line for line in self.read() if line["step"] <= step]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def read(self) -> list[Line]:
        """All complete lines; see `read_all`."""
        return self.read_all()[0]

    def read_all(self) -> tuple[list[Line], bool]:
        """All complete lines, and whether a crash cut one more short at the end.

        Raises:
            RuntimeError: a line before the last is not JSON, or a line is not an object with a
                step.
        """
        if not self.path.exists():
            return [], False
        texts = self.path.read_bytes().split(b"\n")
        if not texts[-1]:
            texts.pop()
        lines = []
        for number, text in enumerate(texts, start=1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError) as error:
                if number == len(texts):
                    return lines, True
                reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
                raise RuntimeError(self._not_a_line(number, reason)) from error
            if not isinstance(line, dict) or not _is_count(line.get("step")):
                raise RuntimeError(self._not_a_line(number, "no object with a step"))
            lines.append(line)
        return lines, False

    def _not_a_line(self, number: int, reason: str) -> str:
        return f"{self.path}:{number} is not a metrics line ({reason}); mend or remove it"


def numbers_of(line: Line, prefix: str = "") -> Iterator[tuple[str, float | None]]:
    """Keys and numbers of a metrics line except `step`; None for a number that was not finite.

    A nested object yields `outer/inner`; strings, lists and booleans are left out.
    """
    for name, value in line.items():
        key = prefix + name
        if isinstance(value, dict):
            yield from numbers_of(value, f"{key}/")
        elif key == "step" or isinstance(value, bool):
            continue
        elif value is None or isinstance(value, int | float):
            # An integer may be larger than any float.
            is_finite = value is not None and abs(value) <= sys.float_info.max
            yield key, value if is_finite else None


class MetricGroup(NamedTuple):
    """Metrics that are shown together.

    Attributes:
        tag: prefix of their names in the writers of report_to.
        title: title of their section in a report.
        words: matches a key of this group; the first group that matches is taken.
    """

    tag: str
    title: str
    words: re.Pattern[str]


LOSS = MetricGroup("train", "Loss", re.compile(r"(^|_)loss$|^[A-Z]+$"))
GROUPS = (
    LOSS,
    MetricGroup(
        "train",
        "Rewards and answers",
        re.compile(r"^(frac_)?reward|^pass@|^completions|^prompts/|^sampling/(sampling_|imp)"),
    ),
    MetricGroup(
        "train",
        "Learning rate and gradient",
        re.compile(r"^learning_rate|^lr\b|grad|^skipped_updates$"),
    ),
    MetricGroup(
        "speed",
        "Speed and memory",
        re.compile(r"_per_second|mfu|flops|throughput|seconds|_ms$|_wait|_time|duration"),
    ),
    MetricGroup("memory", "Speed and memory", re.compile(r"memory|bytes")),
    MetricGroup("experts", "Data", re.compile(r"expert")),
    MetricGroup(
        "data",
        "Data",
        re.compile(r"epoch|token|sample|document|sequence|length|packing|patches|images"),
    ),
    MetricGroup("other", "Further", re.compile(r"")),
)


def group_of(key: str) -> MetricGroup:
    """The first group that matches a key; the last group matches every key."""
    return next(group for group in GROUPS if group.words.search(key))


def tag_of(key: str) -> str:
    """A key's name in the writers of report_to: `train/loss`, `eval/loss`, `data/epoch`."""
    if key.startswith(EVAL_PREFIX):
        return f"eval/{key.removeprefix(EVAL_PREFIX)}"
    return f"{group_of(key).tag}/{key}"


def read_starts(output_dir: Path) -> list[dict[str, Any]]:
    """Entries of a run's run.json, oldest first; empty without the file.

    Raises:
        RuntimeError: the file is damaged or an entry has a value of the wrong kind; the message
            names file, entry, key and value.
    """
    path = output_dir / RUN_FILE
    if not path.exists():
        return []
    starts = read_json_object(path, "what a run writes", _REMEDY).get("starts")
    if not isinstance(starts, list):
        raise RuntimeError(
            f"{path} is not what a run writes: 'starts' is {shown(starts)}, not a list; {_REMEDY}"
        )
    for number, start in enumerate(starts, start=1):
        if (problem := _problem(start)) is not None:
            raise RuntimeError(f"{path}: start {number} {problem}; {_REMEDY}")
    return starts


def _problem(start: Any) -> str | None:
    if not isinstance(start, dict):
        return f"is {shown(start)}, not an object"
    for names, kind, needed in _KINDS:
        adapter = TypeAdapter[Any](kind)
        for name in (name for name in names.split() if start.get(name) is not None):
            try:
                adapter.validate_python(start[name], strict=True)
            except ValidationError:
                return f"has {name} {shown(start[name])}; {needed} is needed"
    begin, end = start.get("started"), start.get("ended")
    if end is not None and begin is None:
        return "has ended, but no 'started'"
    zones = {datetime.fromisoformat(time).tzinfo is None for time in (begin, end) if time}
    if len(zones) > 1:
        return f"has started {begin!r} and ended {end!r}, of which one has no time zone"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _with_degrees(values: dict[str, Any]) -> dict[str, Any]:
    assert all(_is_count(value) for name, value in values.items() if name.endswith("_degree"))
    return values


class _Revision(BaseModel):
    revision: str


# Keys of a run.json entry, the type of their values where these are not null, and its name.
_KINDS: tuple[tuple[str, Any, str], ...] = (
    (
        "started ended",
        Annotated[str, AfterValidator(datetime.fromisoformat)],
        "a time, as 2026-11-21T10:00:00+00:00,",
    ),
    (
        "first_step last_step num_processes",
        Annotated[int, Field(ge=0, lt=2**63)],
        "a number from 0",
    ),
    ("command overrides", list[str], "a list of texts"),
    ("folder host platform device device_name", str, "a text"),
    ("git paddle_vl_git", _Revision, "an object with a revision"),
    ("versions", dict[str, str], "an object of texts"),
    (
        "parallel",
        Annotated[dict[str, Any], AfterValidator(_with_degrees)],
        "an object with degrees",
    ),
    ("settings", dict[str, dict], "an object with sections"),
)
