"""Rows of other formats beside their canonical forms.

A folder has `rows.jsonl`, and `expected.jsonl` with a line for each row: `canonical`, for boxes
with one form per spelling, or `refused`. Remote media count as refused, since no setting allows
them here.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paddle_vl.data.formats.canonical import MEDIA, CanonicalRow, check_targets
from paddle_vl.data.formats.keys import RowSettings
from paddle_vl.data.formats.reader import FORMATS, to_canonical
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import load_rgb

# Special tokens of Qwen3-VL's tokenizer.
CONTROL_TOKENS = tuple(
    f"<|{name}|>"
    for name in (
        "endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start "
        "quad_end vision_start vision_end vision_pad image_pad video_pad"
    ).split()
)
BOXES = ("json", "markers")
Outcome = tuple[str, str | None]


def check_rows(folder: Path) -> Iterator[Outcome]:
    """Each case of a folder of rows, and what differs; None if nothing does."""
    rows, expected = (
        (folder / name).read_text(encoding="utf-8").splitlines()
        for name in ("rows.jsonl", "expected.jsonl")
    )
    for number, (row, wanted) in enumerate(zip(rows, expected, strict=True), start=1):
        yield f"{folder.name} {number}", difference(json.loads(row), json.loads(wanted), folder)


def difference(row: Any, wanted: dict[str, Any], folder: Path) -> str | None:
    """What differs between a row and its line of `expected.jsonl`; None if nothing does."""
    name = wanted.get("format", folder.name)
    format = name if name in FORMATS else None
    canonical = wanted.get("canonical")
    is_boxes = canonical is not None and canonical.keys() == {*BOXES}
    for boxes in BOXES if is_boxes else BOXES[:1]:
        settings = RowSettings(
            boxes=boxes,
            control_tokens=CONTROL_TOKENS,
            image_size=lambda source: load_rgb(folder.parent / source).size,
        )
        try:
            read = to_canonical(row, settings, format=format)
            check_targets(read)
            found = without_bytes(read)
        except BadSampleError as error:
            if canonical is not None:
                return f"refused ({error.kind}): {error}"
            continue
        if canonical is None:
            return f"not refused ({wanted['refused']}: {wanted.get('why')})"
        form = canonical[boxes] if is_boxes else canonical
        if found != form:
            return f"is  {json.dumps(found, ensure_ascii=False)}\n  not {json.dumps(form)}"
    return None


def without_bytes(row: CanonicalRow) -> dict[str, Any]:
    """The row with a digest in place of bytes.

    Raises:
        BadSampleError: a remote source, of kind `remote`.
    """
    for message in row.messages:
        for part in (part for part in message.get("content", ()) if part["type"] in MEDIA):
            source = part[part["type"]]
            if isinstance(source, str) and source.startswith(("http://", "https://")):
                reason = f"{source[:80]!r} is a remote address: save it as a file, or allow it"
                raise BadSampleError("remote", reason)
            if isinstance(source, bytes):
                part[part["type"]] = f"sha256:{hashlib.sha256(source).hexdigest()}"
    return row.to_dict()
