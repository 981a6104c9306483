"""Rows of any files and mixtures as one JSONL file of rows in the canonical form.

Bytes of images and videos become files in a folder `media` beside the new file, paths become
relative to it, addresses and keys that are not read stay. The samples are those of the sources.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from paddle_vl.config.row_sources import RowSourceConfig, Strategy
from paddle_vl.data import media_file
from paddle_vl.data.corpus.opener import ShardOpener
from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.data.formats.keys import BOX_TOKENS, RowSettings
from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.formats.tool_schemas import without_nulls
from paddle_vl.data.jsonl import BadSampleError, OnBadSample, parse_object
from paddle_vl.data.rows.mixture import draws_of
from paddle_vl.data.rows.row_file import open_source
from paddle_vl.files.text_file import replacing

_ADDRESSES = ("http://", "https://")
# Pillow's names of formats whose usual extension is another.
_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg"}
# First bytes of videos, and where they stand.
_VIDEOS = {"mp4": (4, b"ftyp"), "mkv": (0, b"\x1aE\xdf\xa3"), "avi": (8, b"AVI ")}


def convert_rows(
    sources: Sequence[RowSourceConfig],
    output: Path,
    settings: RowSettings,
    *,
    strategy: Strategy = "concat",
    seed: int,
    on_bad_sample: OnBadSample = "fail",
    overwrite: bool = False,
    opener: ShardOpener | None = None,
    fetch: Callable[[str], Path] = Path,
) -> tuple[int, Counter[str]]:
    """Write the rows of a mixture, in the order in which a run draws them.

    Args:
        sources: their `max_length` and `max_pixels` are settings of a run, and of no row.
        output: appears complete or not at all; files in `media` appear one by one.
        settings: of all rows; columns and tags are those of the sources.
        strategy, seed: see `draws_of`.
        on_bad_sample: "skip" leaves bad rows out and counts them.
        overwrite: whether `output` may be there already.

    Returns:
        The number of rows written, and of those left out by kind of fault.

    Raises:
        RuntimeError: a source cannot be read, or a file of `media` cannot be written.
        BadSampleError: with "fail", the first row that cannot be used, with its place.
        ValueError: `output` exists or is no .jsonl file, or no row can be used.
    """
    if output.suffix != ".jsonl":
        raise ValueError(f"{output} has the suffix {output.suffix!r}: name a .jsonl file")
    if output.exists() and not overwrite:
        raise ValueError(f"{output} exists: name another file, or add --overwrite")
    opened = [open_source(source, fetch=fetch, opener=opener) for source in sources]
    draws = draws_of(sources, [len(rows) for rows in opened], strategy, seed=seed)
    output.parent.mkdir(parents=True, exist_ok=True)
    media = _MediaFiles(Path(os.path.realpath(output.parent)))
    writers = []
    for source, rows in zip(sources, opened, strict=True):
        renaming = {key: getattr(source, key) for key in ("columns", "only_columns", "tags")}
        own, folder = replace(settings, **renaming), media_file.MediaFolder(rows.folder)
        writers.append(_RowWriter(own, source.format, folder, media))
    skipped: Counter[str] = Counter()
    with replacing(output) as partial, partial.open("wb") as file:
        for source, number in zip(draws.sources, draws.rows.tolist(), strict=True):
            rows = opened[source]
            try:
                row = rows.row(number)
                with rows.at_place(number):
                    line = writers[source].line(row)
            except BadSampleError as error:
                if on_bad_sample == "fail":
                    raise
                skipped[error.kind] += 1
                continue
            file.write(line)
        if skipped.total() == len(draws):
            raise ValueError(f"all {len(draws)} rows are bad: {dict(skipped)}; correct them")
    return len(draws) - skipped.total(), skipped


@dataclass
class _RowWriter:
    """Writes rows of one source; the first good one gives the format of the others."""

    settings: RowSettings
    format: str | None
    folder: media_file.MediaFolder
    media: "_MediaFiles"

    def line(self, row: dict[str, Any]) -> bytes:
        settings = replace(self.settings, image_size=self._size)
        canonical = to_canonical(row, settings, format=self.format)
        canonical.check_targets()
        canonical = canonical.with_sources(lambda kind, source: self._source(source, kind))
        record = {**_with_nulls(canonical.to_dict()), **self._without_bytes(canonical.extras)}
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        self._check_line(line, canonical)
        self.format = canonical.format
        return line

    def _check_line(self, line: bytes, canonical: Conversation) -> None:
        """Check that the line is read as the row."""
        settings = RowSettings(special_tokens=BOX_TOKENS)
        try:
            again = to_canonical(parse_object(line, "a row"), settings, format="messages")
        except BadSampleError as error:
            hint = """a column that is in the way can be hidden: --columns '{"NAME": "_"}'"""
            raise BadSampleError(
                error.kind, f"written anew it is {error.reason}; {hint}"
            ) from error
        if again.to_dict() != canonical.to_dict():
            raise BadSampleError("not_canonical", f"its line would be read as {again.to_dict()}")

    def _size(self, source: Any) -> tuple[int, int]:
        opened = media_file.media_source(source, "image", "image source", self.folder)
        return media_file.upright_size(opened)

    def _source(self, source: Any, kind: str) -> Any:
        """A source as the new file has it."""
        if isinstance(source, list):
            return [self._source(frame, "image") for frame in source]
        if isinstance(source, bytes):
            return self.media.path_of(source, _extension(source, kind))
        if source.startswith(_ADDRESSES):
            return source
        path = Path(self.folder.path(source, kind))
        media_file.file_size(path, kind)
        # A link keeps its name: that of its target may have no extension.
        return os.path.relpath(f"{os.path.realpath(path.parent)}/{path.name}", self.media.beside)

    def _without_bytes(self, value: Any) -> Any:
        """An extra with paths of files in place of bytes."""
        if isinstance(value, dict):
            return {key: self._without_bytes(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._without_bytes(each) for each in value]
        return self.media.path_of(value, "bin") if isinstance(value, bytes) else value


def _with_nulls(value: Any, key: str = "") -> Any:
    """The canonical form with calls and tools that have nulls as JSON texts, where they stay."""
    if key in ("tools", "tool_calls") and without_nulls(value, None, None) != value:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return {name: _with_nulls(each, name) for name, each in value.items()}
    return [_with_nulls(each) for each in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class _MediaFiles:
    """Files of bytes, named by their digest, in a folder beside the new file."""

    beside: Path

    def path_of(self, content: bytes, extension: str) -> str:
        """The path of a file with the content, relative to the new file."""
        name = f"media/{sha256(content).hexdigest()[:16]}.{extension}"
        path = self.beside / name
        try:
            path.parent.mkdir(exist_ok=True)
            if not path.exists():
                with replacing(path) as partial:
                    partial.write_bytes(content)
            elif path.read_bytes() != content:
                raise RuntimeError(f"{path} has other content than its name says: move it away")
        except OSError as error:
            # Not the row's fault, so never skipped.
            raise RuntimeError(f"{path} cannot be written ({error.strerror}): make room") from error
        return name


def _extension(content: bytes, kind: str) -> str:
    """The extension of an image or a video by its content.

    Raises:
        BadSampleError: it is none that can be read.
    """
    if kind == "image":
        media_file.image_size(content)
        with Image.open(BytesIO(content), formats=media_file.FORMATS) as image:
            return _EXTENSIONS.get(str(image.format), str(image.format).lower())
    for extension, (begin, magic) in _VIDEOS.items():
        if content[begin : begin + len(magic)] == magic:
            return extension
    raise BadSampleError(
        "unreadable_video",
        f"its {len(content)} bytes are no video of {', '.join(_VIDEOS)}: write a file and its path",
    )
