"""A benchmark in a YAML file: its rows, how a row is asked, and how answers are scored."""

import logging
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
from paddle_vl.data.media_file import ImageSection
from paddle_vl.families.vlm.evaluation.metrics import conclusion, options_of
from paddle_vl.families.vlm.inputs.dataset import ConversationData
from paddle_vl.families.vlm.inputs.open_data import open_conversations
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.settings import VLDataConfig
from paddle_vl.generation.config import GenerationConfig

logger = logging.getLogger(__name__)


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
    """columns of images, which come before the prompt in this order, or paths in Jinja with the
    names of columns; or columns and the texts of the prompt in whose places they come"""
    crop: str | None = None
    """column of x and y of corners, [x1, y1, x2, y2, ...] in pixels: of the images the rectangle
    around these"""
    prompt: Annotated[str, Field(min_length=1)]
    """the question, in Jinja with the names of columns; the filter lettered makes lines A. ..., B.
    ... of a list of options"""
    each: str | None = None
    """column of a list, of which each entry makes a sample (reads all rows at the start)"""
    where: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default={})
    """columns and the values that they have in samples that are asked; others are left out (reads
    all rows at the start)"""
    references: Annotated[str, Field(min_length=1)]
    """column of the right answer, or of a list of right answers; or the answer in Jinja"""
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

    @field_validator("prompt", "references", "images")
    @classmethod
    def _compiled(cls, given: Any) -> Any:
        try:
            for text in [given] if isinstance(given, str) else given:
                _JINJA.from_string(text)
        except TemplateError as error:
            raise ValueError(f"it is no template of Jinja: {error}") from error
        return given

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
    data = VLDataConfig(clip_boxes=True, checks=[])
    dataset = open_conversations([suite], data, processor, 0, reader)
    if suite.each is not None or suite.where:
        dataset.split_rows(attrgetter("branches"))
    if not len(dataset):
        raise ValueError(f"{suite.label}: no sample has what `where` asks for, {suite.where}")
    if suite.where:
        found = len(dataset), dataset.row_count()
        logger.info("%s: %d samples of %d rows have what `where` asks for", suite.label, *found)
    return dataset


@dataclass(frozen=True)
class AskedRow(Conversation):
    """The first sample of a row.

    Attributes:
        values: the row's columns, without images.
        others: further samples of the row.
        is_asked: False of a row that has no sample.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    others: tuple["AskedRow", ...] = ()
    is_asked: bool = True

    @property
    def columns(self) -> Mapping[str, Any]:
        return self.values

    @property
    def branches(self) -> list[Conversation]:
        return [self, *self.others] if self.is_asked else []


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
            value = _column(columns, name)
            is_of_objects = isinstance(value, list) and (value or self.suite.where)
            if not is_of_objects or not all(isinstance(each, Mapping) for each in value):
                value = _listed(value)
            rows = [{**columns, name: each} for each in value]
        wanted = self.suite.where.items()
        rows = [
            each for each in rows if all(_column(each, n, needed=False) in v for n, v in wanted)
        ]
        if not rows:
            texts = {"user": "(not asked)", "assistant": "(none)"}
            messages = [{"role": role, "content": text} for role, text in texts.items()]
            return AskedRow(**vars(self._read(messages, {}, directory)), is_asked=False)
        first, *others = (self._asked(each, directory) for each in rows)
        return replace(first, others=tuple(others))

    def _read(self, messages: Any, more: dict[str, Any], directory: Path | None) -> Conversation:
        settings = replace(self.settings, columns={}, only_columns=False)
        reader = RowReader(settings, "messages", self.allow_outside, self.remote)
        return reader({"messages": messages, **more}, directory)

    def _asked(self, columns: dict[str, Any], directory: Path | None) -> AskedRow:
        suite = self.suite
        is_template = "{{" in suite.references
        right = (_rendered if is_template else _column)(columns, suite.references)
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
        conversation = self._read(messages, objects, directory)
        groups = [
            f"{name}={each}"
            for name in suite.groups
            for each in _listed(_column(columns, name, needed=False) or "(none)")
        ]
        extras = {"references": references, "task": groups}
        values = {name: value for name, value in columns.items() if name not in suite.images}
        own: dict[str, Any] = {**vars(conversation), "extras": extras, "values": values}
        return AskedRow(**own)


def _parts(suite: Suite, columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The prompt's parts; see `Suite.images`."""
    text, images = _rendered(columns, suite.prompt, "the prompt"), suite.images
    tags = {tag: name for name, tag in images.items()} if isinstance(images, dict) else {}
    for name in () if tags else images:
        yield _image(suite, columns, name)
    pattern = f"({'|'.join(map(re.escape, tags))})"
    for piece in re.split(pattern, text) if tags else [text]:
        if piece in tags:
            yield _image(suite, columns, tags[piece])
        elif piece:
            yield {"type": "text", "text": piece}


def _image(suite: Suite, columns: Mapping[str, Any], name: str) -> dict[str, Any]:
    source = _rendered(columns, name, "a path") if "{{" in name else _column(columns, name)
    if suite.crop is None:
        return {"type": "image", "image": source}
    corners = _column(columns, suite.crop)
    is_list = isinstance(corners, list | tuple) and len(corners) > 3 and len(corners) % 2 == 0
    if not is_list or not all(type(each) in (int, float) for each in corners):
        raise _wrong(f"{corners!r:.80} are no corners, x and y of two or more", columns)
    return {"type": "image", "image": ImageSection(source, tuple(corners))}


def _rendered(columns: Mapping[str, Any], template: str, what: str = "the reference") -> str:
    try:
        return _JINJA.from_string(template).render(columns)
    except (TemplateError, TypeError, ValueError) as error:
        raise _wrong(f"{what} cannot be made: {error}", columns) from error


def _column(columns: Mapping[str, Any], name: str, needed: bool = True) -> Any:
    """The value of a column; of `a.b` that of b in a. None of one that is not needed."""
    found: Any = columns
    for part in [name] if name in columns else name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            if needed:
                raise _wrong(f"it has no value of {name!r}", columns)
            return None
        found = found[part]
    return found


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
