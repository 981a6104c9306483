"""Sources of a training mix: entries of data.train and data.eval beside plain paths."""

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag

from paddle_vl.config.row_sources import RowFormat, RowSourceConfig
from paddle_vl.config.section import FilePath, Section

DocumentFormat = Literal["messages", "text", "image_text", "interleaved"]
# Suffixes of a pair of memory-mapped token files.
TOKEN_SUFFIXES = (".idx", ".bin")
# Suffixes of files that only sources can be read from; they are no plain JSONL files.
_CONTAINERS = (".parquet", ".arrow", ".csv", ".tsv", ".tar", ".gz", ".zst", *TOKEN_SUFFIXES)


class SourceConfig(Section):
    """One source of a training mix."""

    path: FilePath | Annotated[list[FilePath], Field(min_length=1)]
    """files of the source: a path, a pattern (*, ?, [], **) or a list of both; JSONL, JSON arrays,
    CSV and TSV (also .gz and .zst), Parquet, Arrow streams, WebDataset .tar, or the .idx, .bin or
    common prefix of a pair of token files"""
    format: DocumentFormat = "messages"
    """what a row is: messages (a conversation), text, image_text (an image and its caption) or
    interleaved (texts and images in document order)"""
    weight: Annotated[float, Field(gt=0)] | None = None
    """share of the tokens of the mix, relative to the other weights; all sources have one, or
    none"""
    name: Annotated[str, Field(min_length=1)] | None = None
    """name in metrics and messages; default: the file's name without suffix"""
    targets: Literal["all", "answers", "after_image"] | None = None
    """text tokens that learn: all; answers (of assistants, for messages, where it is the default);
    after_image: those behind the first image of their document"""
    loss_weight: Annotated[float, Field(gt=0)] = 1.0
    """weight of a target token of this source in the loss"""
    columns: dict[str, str] = Field(default={})
    """other names of a row's entries in these files, e.g. {text: caption, image: jpg}"""

    @property
    def patterns(self) -> list[str]:
        """The paths and patterns."""
        return [self.path] if isinstance(self.path, str) else list(self.path)

    def files(self) -> list[str]:
        """Existing files in the order of the patterns, those of a pattern sorted, each once. Of a
        pair of token files it is the .idx."""
        return list(dict.fromkeys(file for each in self.patterns for file in matches(each)))

    @property
    def label(self) -> str:
        """The name, or one from the first path."""
        if self.name is not None:
            return self.name
        first = Path(self.patterns[0])
        stem = first.name.split(".")[0].strip("*?[]-_")
        return stem or first.parent.name or "source"


def matches(pattern: str) -> list[str]:
    """Files that a path or pattern names; the prefix of token files gives the .idx."""
    path = Path(pattern)
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        return [str(path.with_suffix(".idx"))]
    if path.is_file():
        return [pattern]
    if Path(pattern + ".idx").is_file():
        return [pattern + ".idx"]
    found = sorted(file for file in glob.glob(pattern, recursive=True) if Path(file).is_file())
    pairs = {file for file in found if file.endswith(".idx")}
    return [file for file in found if f"{file.removesuffix('.bin')}.idx" not in pairs]


PATH, SOURCE, ROWS = "(path)", "(source)", "(rows)"
# Settings that only sources of rows have.
_OF_ROWS = RowSourceConfig.model_fields.keys() - SourceConfig.model_fields.keys()


def _kind(value: Any) -> str:
    """Which of the kinds of entries a value is: a source of rows by its format or a setting that
    only these have."""
    if isinstance(value, RowSourceConfig):
        return ROWS
    if not isinstance(value, dict):
        return SOURCE if isinstance(value, SourceConfig) else PATH
    is_of_rows = value.get("format") in set(get_args(RowFormat)) - {"messages"}
    return ROWS if is_of_rows or _OF_ROWS & value.keys() else SOURCE


DataEntry = Annotated[
    Annotated[FilePath, Tag(PATH)]
    | Annotated[SourceConfig, Tag(SOURCE)]
    | Annotated[RowSourceConfig, Tag(ROWS)],
    Discriminator(_kind),
]
_ONE = str | dict | SourceConfig | RowSourceConfig
DataEntries = Annotated[
    list[DataEntry], BeforeValidator(lambda each: [each] if isinstance(each, _ONE) else each)
]


def has_sources(entries: Sequence[Any]) -> bool:
    """Whether the entries are a pretraining mix: any is a source of documents, or a pair of token
    files; other paths are conversations."""
    return any(
        isinstance(entry, SourceConfig)
        or (isinstance(entry, str) and Path(entry).suffix.lower() in TOKEN_SUFFIXES)
        for entry in entries
    )


def is_container(path: str | Path) -> bool:
    """Whether a file can only be read as a source, by its suffix."""
    return Path(path).suffix.lower() in _CONTAINERS


def as_sources(entries: Sequence[str | SourceConfig]) -> list[SourceConfig]:
    """All entries as sources, with different names; a plain path is one of conversations."""
    sources = [SourceConfig(path=each) if isinstance(each, str) else each for each in entries]
    taken: set[str] = set()
    named = []
    for source in sources:
        label, number = source.label, 2
        while label in taken:
            label, number = f"{source.label}_{number}", number + 1
        taken.add(label)
        named.append(source.model_copy(update={"name": label}))
    return named
