"""Hypothesis strategies that damage valid documents and files."""

import copy
import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

Bytes = st.SearchStrategy[bytes]
Files = st.SearchStrategy[dict[str, bytes]]
ODD_NUMBERS = [
    0, 1, -1, 2, 3, 7, 16, 255, 65536, 2**31 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63),
    10**30, 10**400, 0.0, -0.0, 0.5, 1.5, -2.5, 1e-8, 1e-320, 1e10, 1e39, 1e308, float("nan"),
    float("inf"), -float("inf"),
]  # fmt: skip
# The files above lie beside the folder of an input; no parser may open them.
ODD_TEXTS = [
    "", " ", "a", "0", "1e5", "true", "null", "NaN", "none", "\0", "a\0b", "\ud800", "é", "\u202e",
    "\ufeff", "..", ".", "/", "a/b", "a\\b", "%s%n", "{0}", "$x", "<image>", "<video>",
    "<|im_end|>", "<|image_pad|>", "file:///etc/passwd", "http://127.0.0.1:9/x",
    "data:image/png;base64,AAAA", "*", "(", "[", "x" * 300, "x" * 5000, "../outside.png",
    "../outside.json", "../outside.safetensors", "/etc/passwd",
]  # fmt: skip
_TOKENS = [
    b"[", b"{", b"}", b"]", b",", b":", b'"', b"null", b"NaN", b"1e999", b"-", b"0", b"9" * 5000,
    b'"\\ud800"', b"\\", b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r\n", b"\n", b"\t",
    b'"a":1,', b"[" * 2000, b'{"a":' * 2000, b"//", b"'", b" " * 1000,
]  # fmt: skip


def _nested(depth: int) -> Any:
    inner = _nested(depth - 1) if depth else 1
    return [inner] if depth % 2 else {"a": inner}


ODD_VALUES = [
    None, True, False, [], {}, [[]], [None], [0], [1, 2], ["a"], [1, "a", None], {"a": 1}, {"": 0},
    [[1, 2], [3]], [0] * 300, ["a"] * 300, _nested(8), _nested(60), _nested(200),
    {str(i): i for i in range(100)},
]  # fmt: skip
# Copies, because a later change may change what it has put in.
odd_values = st.one_of(
    *[st.sampled_from(each).map(copy.deepcopy) for each in (ODD_NUMBERS, ODD_TEXTS, ODD_VALUES)],
    st.integers(-100, 10_000),
    st.floats(),
    st.text(max_size=12),
)


def one_of(draw, items: Sequence[Any]) -> Any:
    """As `sampled_from`, without the cost of a new strategy for every list."""
    return items[draw(st.integers(0, len(items) - 1))]


def _places(outer: Any) -> Iterator[tuple[Any, Any]]:
    """Each value in a document as its container and its key there."""
    for key in list(outer) if isinstance(outer, dict) else range(min(len(outer), 50)):
        yield outer, key
        if isinstance(outer[key], dict | list):
            yield from _places(outer[key])


def _neighbour(draw, value: Any) -> Any:
    """A value near this one, mostly of its type and often still allowed."""
    if isinstance(value, bool):
        return one_of(draw, [not value, int(value), str(value)])
    if isinstance(value, int | float):
        near = [value + 1, value - 1, -value, value * 2, str(value), [value], *ODD_NUMBERS]
        # Numbers beyond the range of float, and NaN, have no float and no half.
        return one_of(draw, [*near, float(value), value // 2] if abs(value) < 1e300 else near)
    if isinstance(value, str):
        cut = draw(st.integers(0, len(value)))
        odd = [value[:cut] + each + value[cut:] for each in ("\ud800", "\n")]
        return one_of(draw, [value[:cut], value + value, value.upper(), [value], *odd])
    if isinstance(value, list):
        near = [value[:-1], value + value, value[::-1], [value], value * 20]
        return one_of(draw, [*near, value[0] if value else None])
    return draw(odd_values)


@st.composite
def mutated(draw, seeds: Sequence[Any], most: int = 2) -> Any:
    """One of the documents with up to `most` changed values, types, keys and levels of nesting."""
    root = [copy.deepcopy(one_of(draw, seeds))]
    for _ in range(draw(st.integers(0, most))):
        places = list(_places(root))
        outer, key = one_of(draw, places)
        change = one_of(draw, ["near"] * 6 + ["odd", "drop", "drop", "copy", "key", "add"])
        if change == "near":
            outer[key] = _neighbour(draw, outer[key])
        elif change == "copy":
            other, at = one_of(draw, places)
            outer[key] = copy.deepcopy(other[at])
        elif change == "odd" or outer is root:
            outer[key] = draw(odd_values)
        elif change == "drop":
            del outer[key]
        elif isinstance(outer, dict):
            value = outer.pop(key) if change == "key" else draw(odd_values)
            outer[one_of(draw, [str(each) for _, each in places] + ODD_TEXTS)] = value
        else:
            outer.insert(key, draw(odd_values))
    return root[0]


def as_json(document: Any, *, is_ascii: bool = True) -> bytes:
    """A document as JSON; it may hold NaN, lone surrogates and huge numbers."""
    return json.dumps(document, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")


@st.composite
def damaged(draw, seeds: Sequence[bytes], tokens: Sequence[bytes] = (), most: int = 4) -> bytes:
    """One of the files with changed bits, numbers (or `tokens`) and ranges, often in its head."""
    data = bytearray(one_of(draw, seeds))
    for _ in range(draw(st.integers(0, most))):
        end = min(len(data), 96) if draw(st.booleans()) else len(data)
        at, length = draw(st.integers(0, max(end - 1, 0))), draw(st.integers(1, 40))
        change = one_of(draw, ["flip", "flip", "put", "put", "cut", "double", "end"])
        if change == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif change == "put" and tokens:
            data[at:at] = one_of(draw, tokens)
        elif change == "put":
            size, order = one_of(draw, [1, 2, 4, 8]), one_of(draw, ["little", "big"])
            number = one_of(draw, [0, 1, 2, 127, 255, 256, 65535, 2**31 - 1, 2**32 - 1, -1])
            data[at : at + size] = (number % 256**size).to_bytes(size, order)
        elif change == "cut":
            del data[at : at + length]
        elif change == "double":
            data[at:at] = data[at : at + length]
        elif change == "end":
            del data[max(at, len(data) // 8) :]
    return bytes(data)


def cut_off(seeds: Sequence[bytes]) -> Bytes:
    """The beginning of a file, for libraries that trust what a whole file says."""
    whole, parts = st.sampled_from(seeds), st.integers(0, 50)
    return st.builds(lambda seed, part: seed[: len(seed) * part // 50], whole, parts)


def texts(whole: Sequence[bytes], tokens: Sequence[bytes] = _TOKENS) -> Bytes:
    """Texts with pieces put in, removed or doubled, or cut short."""
    return damaged(whole, tokens, 3)


def json_files(seeds: Sequence[Any], most: int = 2) -> Bytes:
    """JSON of changed documents, and sometimes broken JSON."""
    written = st.builds(
        lambda document, is_ascii: as_json(document, is_ascii=is_ascii),
        mutated(seeds, most),
        st.booleans(),
    )
    return st.one_of(written, written, written, texts([*map(as_json, seeds)]))


def json_lines(seeds: Sequence[Any], most: int = 3) -> Bytes:
    """Files with one JSON document per line, some lines broken."""
    lines = st.lists(json_files(seeds), min_size=1, max_size=most)
    return st.builds(bytes.join, st.sampled_from([b"\n", b"\n", b"\r\n", b"\n\n"]), lines)


def tensor_files(seeds: Sequence[bytes]) -> Bytes:
    """safetensors files with changed headers, values, or lengths of the header."""
    starts = [8 + struct.unpack("<Q", seed[:8])[0] for seed in seeds]
    headers = [json.loads(seed[8:at]) for seed, at in zip(seeds, starts, strict=True)]
    bodies = st.sampled_from([seed[at:] for seed, at in zip(seeds, starts, strict=True)])
    sizes = st.sampled_from([None] * 20 + [0, 2**40, 2**64 - 1])

    def joined(header: bytes, size: int | None, body: bytes) -> bytes:
        return struct.pack("<Q", len(header) if size is None else size) + header + body

    return st.one_of(st.builds(joined, json_files(headers), sizes, bodies), damaged(seeds))


def in_file(name: str, contents: Bytes) -> Files:
    """Contents as those of the file with this name."""
    return contents.map(lambda content: {name: content})


def one_damaged(folder: Path, only: str = "*", *more: Any) -> Files:
    """One of the files of a folder and those in it, damaged as its kind needs.

    Args:
        only: pattern of their names.
        more: further documents of the same kind; of files that are no JSON, whole files.
    """
    found = []
    for file in sorted(path for path in folder.rglob(only) if path.is_file()):
        content, kind = file.read_bytes(), file.suffix
        if kind == ".json":
            contents = json_files([json.loads(content), *more])
        elif kind == ".jsonl":
            contents = json_lines([*map(json.loads, content.splitlines()), *more])
        else:
            ways = {".safetensors": tensor_files, ".arrow": cut_off}
            contents = ways.get(kind, damaged)([content, *more])
        found.append(in_file(str(file.relative_to(folder)), contents))
    return st.one_of(found)
