"""Check rows of other formats against their canonical forms.

    python tools/check_formats.py tests/golden/formats            # all folders in it
    python tools/check_formats.py tests/golden/formats/sharegpt

A folder has `rows.jsonl`, and `expected.jsonl` with a line for each row: `canonical`, for boxes
with one form per spelling, or `refused`. Prints a line per case, `ok` or the difference, and exits
with 1 if any differs. Remote media count as refused, since no setting allows them here.
"""

import argparse
import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paddle_vl.data.formats.canonical import MEDIA, Conversation
from paddle_vl.data.formats.dialects import FORMATS
from paddle_vl.data.formats.keys import RowSettings
from paddle_vl.data.formats.reader import to_canonical
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
# Folders of files and of mixtures, with the function of `format_cases` that checks each.
OTHERS = {"containers": "check_containers", "mixtures": "check_mixtures"}
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
            read.check_targets()
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


def without_bytes(row: Conversation) -> dict[str, Any]:
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


def outcomes(folder: Path) -> Iterator[Outcome]:
    """The outcomes of a folder of cases, or of all such folders in it."""
    if folder.name in OTHERS:
        if importlib.util.find_spec("format_cases") is not None:
            checks = importlib.import_module("format_cases")
            yield from getattr(checks, OTHERS[folder.name])(folder)
    elif (folder / "expected.jsonl").is_file():
        yield from check_rows(folder)
    else:
        for inner in sorted(each for each in folder.iterdir() if each.is_dir()):
            yield from outcomes(inner)


def main() -> int:
    """Check the folders of the command line; 1 if a case differs or there is none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    cases = failed = 0
    for folder in parser.parse_args().folders:
        for case, problem in outcomes(folder):
            print(f"{case}: {problem or 'ok'}")
            cases, failed = cases + 1, failed + (problem is not None)
    print(f"{cases - failed} of {cases} cases are equal")
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
