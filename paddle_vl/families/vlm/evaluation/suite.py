"""A benchmark in a YAML file: its rows, how a row is asked, and how answers are scored."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import Field, field_validator

from paddle_vl.config.load import load_section
from paddle_vl.config.row_sources import RowSourceConfig
from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.data.formats.keys import from_text, renamed
from paddle_vl.data.formats.reader import RowReader
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.evaluation.metrics import conclusion, options_of
from paddle_vl.families.vlm.inputs.dataset import ConversationData
from paddle_vl.families.vlm.inputs.open_data import open_conversations
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.settings import VLDataConfig
from paddle_vl.generation.config import GenerationConfig


def _lettered(options: Any) -> str:
    """Lines `A. ...` of a list of options."""
    found = options_of({"options": options})
    if not found:
        raise TemplateError(f"lettered needs a list of options, which {options!r:.80} is not")
    return "\n".join(f"{letter}. {text}" for letter, text in found.items())


_JINJA = ImmutableSandboxedEnvironment(
    undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_JINJA.filters["lettered"] = _lettered


class Suite(RowSourceConfig):
    """A benchmark: a source of rows, how a row is asked, and how answers are scored."""

    images: list[str] | dict[str, str] = Field(default=[])
    """columns of images, which come before the prompt in this order; or columns and the texts of
    the prompt in whose places they come"""
    prompt: Annotated[str, Field(min_length=1)]
    """the question, in Jinja with the names of columns; the filter lettered makes lines A. ..., B.
    ... of a list of options"""
    each: str | None = None
    """column of a list, of which each entry makes a sample (reads all rows at the start)"""
    references: str
    """column of the right answer, or of a list of right answers"""
    boxes: Literal["corners", "size"] | None = None
    """that column is a box in pixels of the image, [x1, y1, x2, y2] or [x, y, width, height]; the
    reference has it in thousandths"""
    extract: str | None = None
    """regular expression; what its last match has in parentheses is the answer that is scored;
    without a match the whole answer is"""
    metrics: Annotated[list[str], Field(min_length=1)] = Field(default=["exact_match"])
    """what answers are scored with, see docs/evaluation.md"""
    groups: list[str] = Field(default=[])
    """columns for whose values scores are told, too"""
    min_pixels: Annotated[int, Field(ge=1)] | None = None
    """smallest image, in pixels; default: the processor's"""
    generation: dict[str, Any] = Field(default={})
    """of generation_config.json, such as max_new_tokens and temperature; default: greedy, 64
    tokens"""

    @field_validator("prompt")
    @classmethod
    def _compiled(cls, text: str) -> str:
        try:
            _JINJA.from_string(text)
        except TemplateError as error:
            raise ValueError(f"it is no template of Jinja: {error}") from error
        return text

    @field_validator("extract")
    @classmethod
    def _expression(cls, text: str | None) -> str | None:
        try:
            re.compile(text or "")
        except re.error as error:
            raise ValueError(f"it is no regular expression: {error}") from error
        return text

    @field_validator("generation")
    @classmethod
    def _settings(cls, settings: dict[str, Any]) -> dict[str, Any]:
        GenerationConfig().updated(**settings)
        if settings.keys() & {"temperature", "top_k", "top_p"} and not settings.get("do_sample"):
            raise ValueError("they are read with do_sample: true alone: add it, or remove them")
        return settings

    @field_validator("format", "tags", "weight", "max_length")
    @classmethod
    def _refused(cls, value: Any) -> Any:
        raise ValueError("a benchmark has no such setting, which is of conversations: remove it")

    def scored_part(self, answer: str) -> str:
        """See `extract`."""
        answer = conclusion(answer)
        found = list(re.finditer(self.extract, answer)) if self.extract else []
        return (found[-1][found[-1].lastindex or 0] or "").strip() if found else answer


def read_suite(file: str | Path) -> Suite:
    """Read a description.

    Raises:
        RuntimeError: the file cannot be read.
        ValueError: it is no description; all problems are in the message.
    """
    return load_section(file, Suite)


def open_suite(suite: Suite, processor: VLProcessor) -> ConversationData:
    """The samples of a benchmark; errors as of `open_conversations`."""
    reader = partial(SuiteReader, suite=suite)
    # A box of an annotation may end beyond its image.
    data = VLDataConfig(clip_boxes=True)
    dataset = open_conversations([suite], data, processor, 0, reader)
    if suite.each is not None:
        dataset.split_rows(attrgetter("branches"))
    return dataset


@dataclass(frozen=True)
class AskedRow(Conversation):
    """The first sample of a row.

    Attributes:
        values: the row's columns, without images.
        others: further samples of the row.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    others: tuple["AskedRow", ...] = ()

    @property
    def columns(self) -> Mapping[str, Any]:
        return self.values

    @property
    def branches(self) -> list[Conversation]:
        return [self, *self.others]


@dataclass(frozen=True, kw_only=True)
class SuiteReader(RowReader):
    """Makes conversations of a benchmark's rows. It can be pickled."""

    suite: Suite

    def __call__(self, row: Mapping[str, Any], directory: Path | None = None) -> AskedRow:
        """See `RowReader`.

        Raises:
            BadSampleError: a column is missing, or the prompt cannot be made.
        """
        columns = renamed(row, self.settings)
        rows = [columns]
        if (name := self.suite.each) is not None:
            rows = [{**columns, name: each} for each in _listed(_column(columns, name))]
        first, *others = (self._asked(each, directory) for each in rows)
        return replace(first, others=tuple(others))

    def _asked(self, columns: dict[str, Any], directory: Path | None) -> AskedRow:
        suite, right = self.suite, _column(columns, self.suite.references)
        if suite.boxes is None:
            references = _listed(right)
            told, objects = references[0], {}
        elif isinstance(right, list) and len(right) == 4:
            x, y, *end = right
            end = [x + end[0], y + end[1]] if suite.boxes == "size" else end
            references, told, objects = [], "<bbox>", {"objects": {"bbox": [[x, y, *end]]}}
        else:
            raise _wrong(f"{right!r:.80} is no box of four numbers", columns)
        messages = [
            {"role": "user", "content": [*_parts(suite, columns)]},
            {"role": "assistant", "content": [{"type": "text", "text": told}]},
        ]
        settings = replace(self.settings, columns={}, only_columns=False)
        reader = RowReader(settings, "messages", self.allow_outside, self.remote)
        conversation = reader({"messages": messages, **objects}, directory)
        groups = [
            f"{name}={each}"
            for name in suite.groups
            for each in _listed(columns.get(name) or "(none)")
        ]
        extras = {"references": references, "task": groups}
        values = {name: value for name, value in columns.items() if name not in suite.images}
        own: dict[str, Any] = {**vars(conversation), "extras": extras, "values": values}
        return AskedRow(**own)


def _parts(suite: Suite, columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The prompt's parts; see `Suite.images`."""
    try:
        text = _JINJA.from_string(suite.prompt).render(columns)
    except (TemplateError, TypeError, ValueError) as error:
        raise _wrong(f"the prompt cannot be made: {error}", columns) from error
    images = suite.images
    tags = {tag: name for name, tag in images.items()} if isinstance(images, dict) else {}
    for name in () if tags else images:
        yield {"type": "image", "image": _column(columns, name)}
    pattern = f"({'|'.join(map(re.escape, tags))})"
    for piece in re.split(pattern, text) if tags else [text]:
        if piece in tags:
            yield {"type": "image", "image": _column(columns, tags[piece])}
        elif piece:
            yield {"type": "text", "text": piece}


def _column(columns: Mapping[str, Any], name: str) -> Any:
    if name not in columns:
        raise _wrong(f"it has no value of {name!r}", columns)
    return columns[name]


def _wrong(what: str, columns: Mapping[str, Any]) -> BadSampleError:
    reason = f"{what}; it has {', '.join(columns)}: correct the description of the suite"
    return BadSampleError("missing_key", reason)


def _listed(value: Any) -> list[str]:
    """One or several texts; a list of texts may be written as text."""
    if isinstance(value, str) and value.startswith(("['", '["')):
        value = from_text(value, literal=True)
    several = value if isinstance(value, list | tuple) else [value]
    found = [str(each).strip() for each in several]
    if not found:
        raise BadSampleError("missing_key", "a list of the row is empty, which one answer needs")
    return found
