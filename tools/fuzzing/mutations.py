"""Hypothesis strategies that damage valid values, types, keys, nesting, texts and bytes."""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzzing.parser import Parser

NAN, INFINITY = float("nan"), float("inf")
# Valid files with these names lie outside the input's folder; no parser may open them.
OUTSIDE = ("../outside.png", "../outside.json", "../outside.safetensors", "/etc/passwd")


def _nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


ODD_NUMBERS = [
    0, 1, -1, 2, 3, 7, 8, 16, 64, 255, 256, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63,
    2**64, -(2**63) - 1, 10**30, 10**400, 0.0, -0.0, 0.5, 1.0, 1.5, -2.5, 1e-8, 1e-320, 1e10, 1e38,
    1e39, 1e308, -1e308, NAN, INFINITY, -INFINITY,
]  # fmt: skip
ODD_TEXTS = [
    "", " ", "a", "0", "1", "1e5", "true", "null", "NaN", "none", "\0", "a\0b", "\ud800", "\udfff",
    "é", "\u202e", "😀", "\ufeff", "..", ".", "/", "a/b", "a\\b", "%s%n", "{0}", "$x", "$\\frac{",
    "<image>", "<video>", "<bbox>", "<|im_end|>", "<|image_pad|>", "file:///etc/passwd",
    "http://127.0.0.1:9/x", "data:image/png;base64,AAAA", "*", "(", "[", "x" * 300, "x" * 5000,
    *OUTSIDE,
]  # fmt: skip
ODD_VALUES = [
    None, True, False, [], {}, [[]], [None], [0], [1, 2], ["a"], [1, "a", None], {"a": 1}, {"": 0},
    [[1, 2], [3]], [0] * 300, ["a"] * 300, _nested(8), _nested(60), _nested(200),
    {str(i): i for i in range(100)},
]  # fmt: skip
_TEXT_TOKENS = [
    b"[", b"{", b"}", b"]", b",", b":", b'"', b"null", b"NaN", b"-Infinity", b"1e999", b"-", b"0",
    b"9" * 5000, b'"\\ud800"', b'"\\u0000"', b"\\", b"\0", b"\xff", b"\xed\xa0\x80",
    b"\xef\xbb\xbf", b"\r\n", b"\n", b"\t", b'"a":1,', b'"step":1,', b"[" * 2000, b'{"a":' * 2000,
    b"/*", b"//", b"'", b" " * 1000,
]  # fmt: skip

# Copies, because later mutations may change the inserted value.
odd_values = st.one_of(
    st.sampled_from(ODD_NUMBERS),
    st.sampled_from(ODD_TEXTS),
    st.sampled_from(ODD_VALUES).map(copy.deepcopy),
    st.integers(-100, 10_000),
    st.floats(),
    st.text(max_size=12),
)
# Makes Unicode's table now, which takes seconds, and not in each of the processes that are forked.
odd_values.validate()


def _places(value: Any, place: tuple = ()) -> list[tuple]:
    """The path of every value in a document, its own first."""
    found = [place]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _places(inner, (*place, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value[:50]):
            found += _places(inner, (*place, i))
    return found


def _at(document: Any, place: tuple) -> Any:
    for key in place:
        document = document[key]
    return document


# Mutations of a place in a document, and those that often leave it valid.
_CHANGES = ("odd", "near", "near", "drop", "key", "add", "copy")
_GENTLE = ("near", "near", "near", "number", "number", "drop", "copy")


def _one_of(draw, items: Sequence[Any]) -> Any:
    """As `sampled_from`, without the cost of a new strategy for every list."""
    return items[draw(st.integers(0, len(items) - 1))]


def _neighbour(draw, value: Any) -> Any:
    """A value near this one, mostly of its type and often still allowed."""
    if isinstance(value, bool):
        return _one_of(draw, [not value, int(value), str(value)])
    if isinstance(value, int | float):
        near = [value + 1, value - 1, -value, value * 2, str(value), [value], value * 1000]
        # Numbers beyond the range of float, and NaN, have no float and no half.
        near += [float(value), value // 2] if abs(value) < 1e300 else []
        return _one_of(draw, near)
    if isinstance(value, str):
        cut = draw(st.integers(0, len(value)))
        near = [value[:cut], value + value, value.upper(), value[:cut] + "\ud800" + value[cut:]]
        return _one_of(draw, [*near, [value], value[:cut] + "\n" + value[cut:]])
    if isinstance(value, list):
        near = [value[:-1], value + value, value[::-1], [value], value * 20]
        return _one_of(draw, [*near, value[0] if value else None])
    return draw(odd_values)


@st.composite
def mutated(draw, seeds: Sequence[Any], most: int = 3, changes: Sequence[str] = _CHANGES) -> Any:
    """One of the documents with up to `most` changed values, types, keys and levels of nesting."""
    document = copy.deepcopy(_one_of(draw, seeds))
    for _ in range(draw(st.integers(0, most))):
        places = _places(document)
        place, change = _one_of(draw, places), _one_of(draw, changes)
        if not place:
            if change == "odd":
                document = draw(odd_values)
            elif change == "add" and isinstance(document, dict):
                document[_one_of(draw, ODD_TEXTS)] = draw(odd_values)
            continue
        outer, key = _at(document, place[:-1]), place[-1]
        if change == "odd":
            outer[key] = draw(odd_values)
        elif change == "near":
            outer[key] = _neighbour(draw, outer[key])
        elif change == "number" and type(outer[key]) in (int, float):
            outer[key] = _one_of(draw, [*ODD_NUMBERS, draw(st.integers(0, 5000))])
        elif change == "drop":
            del outer[key]
        elif change == "copy":
            outer[key] = copy.deepcopy(_at(document, _one_of(draw, places)))
        elif change in ("key", "add") and isinstance(outer, dict):
            named = _one_of(draw, [str(p[-1]) for p in places if p] + ODD_TEXTS)
            value = outer.pop(key) if change == "key" else draw(odd_values)
            outer[named] = value
        elif change == "add":
            outer.insert(key, draw(odd_values))
    return document


@st.composite
def with_texts(draw, seeds: Sequence[Any], texts: Sequence[str]) -> bytes:
    """JSON of a document, sometimes changed, with one to three of the texts inside of its own."""
    document = draw(mutated(seeds, 1, _GENTLE))
    places = [place for place in _places(document) if isinstance(_at(document, place), str)]
    for place in [_one_of(draw, places) for _ in range(draw(st.integers(1, 3)))] if places else ():
        if place:
            outer, key = _at(document, place[:-1]), place[-1]
            at = draw(st.integers(0, len(outer[key])))
            outer[key] = outer[key][:at] + _one_of(draw, texts) + outer[key][at:]
    return as_json(document)


def as_json(document: Any, *, is_ascii: bool = True) -> bytes:
    """A document as JSON; it may hold NaN, lone surrogates and huge numbers."""
    return json.dumps(document, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")


def damage_text(draw, text: bytes, tokens: Sequence[bytes] = _TEXT_TOKENS) -> bytes:
    """A text with pieces inserted, removed or doubled, or cut short."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        change = _one_of(draw, ["put", "put", "cut", "double", "end", "flip"])
        length = draw(st.integers(1, 30))
        if change == "put":
            text = text[:at] + _one_of(draw, tokens) + text[at:]
        elif change == "cut":
            text = text[:at] + text[at + length :]
        elif change == "double":
            text = text[:at] + text[at : at + length] + text[at:]
        elif change == "end":
            text = text[:at]
        elif text:
            at = min(at, len(text) - 1)
            flipped = text[at] ^ (1 << draw(st.integers(0, 7)))
            text = text[:at] + bytes([flipped]) + text[at + 1 :]
    return text


@st.composite
def damaged_text(draw, texts: Sequence[bytes], tokens: Sequence[bytes] = _TEXT_TOKENS) -> bytes:
    """One of the texts, damaged by `damage_text`."""
    return damage_text(draw, _one_of(draw, texts), tokens)


@st.composite
def damaged_bytes(draw, seeds: Sequence[bytes], most: int = 5) -> bytes:
    """A binary file with changed bits, numbers and ranges, mostly in its head."""
    data = bytearray(_one_of(draw, seeds))
    for _ in range(draw(st.integers(0, most))):
        end = min(len(data), 96) if draw(st.booleans()) else len(data)
        at, length = draw(st.integers(0, max(end - 1, 0))), draw(st.integers(1, 40))
        change = _one_of(draw, ["flip", "flip", "number", "number", "cut", "double", "end"])
        if change == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif change == "number":
            size, order = _one_of(draw, [1, 2, 4, 8]), _one_of(draw, ["little", "big"])
            number = _one_of(draw, [0, 1, 2, 127, 255, 256, 65535, 2**31 - 1, 2**32 - 1, -1])
            data[at : at + size] = (number % 256**size).to_bytes(size, order)
        elif change == "cut":
            del data[at : at + length]
        elif change == "double":
            data[at:at] = data[at : at + length]
        elif change == "end":
            del data[max(at, len(data) // 8) :]
    return bytes(data)


def json_bytes(seeds: Sequence[Any], most: int = 3) -> st.SearchStrategy[bytes]:
    """JSON files: mostly documents with other values, else broken texts and raw bytes."""
    gentle, wild = mutated(seeds, most, _GENTLE), mutated(seeds, most)
    raw = st.binary(max_size=64)

    @st.composite
    def files(draw) -> bytes:
        way = _one_of(draw, ["gentle"] * 10 + ["wild"] * 6 + ["broken"] * 3 + ["raw"])
        if way == "raw":
            return draw(raw)
        text = as_json(draw(wild if way == "wild" else gentle), is_ascii=draw(st.booleans()))
        return damage_text(draw, text) if way == "broken" else text

    return files()


def json_lines(
    seeds: Sequence[Any], most_lines: int = 3, most: int = 2
) -> st.SearchStrategy[bytes]:
    """Files with one JSON document per line, some lines broken."""
    whole, near = st.sampled_from(seeds).map(as_json), json_bytes(seeds, most)
    lines = st.lists(st.one_of(near, near, whole), min_size=1, max_size=most_lines)
    ends = st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b"\n\n"])
    return st.builds(lambda end, parts: end.join(parts), ends, lines)


def in_file(name: str, contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[dict[str, bytes]]:
    """Contents as those of the file with this name."""
    return contents.map(lambda content: {name: content})


def of_json(
    file: Path, seeds: Sequence[Any], parse: Callable[[], object], *named: str, most: int = 3
) -> Parser:
    """The parser of a JSON file, which is written with the first seed.

    Args:
        named: see `Parser`; by default the file's name.
    """
    file.write_bytes(as_json(seeds[0]))
    return Parser(in_file(file.name, json_bytes(seeds, most)), parse, named or (file.name,))
