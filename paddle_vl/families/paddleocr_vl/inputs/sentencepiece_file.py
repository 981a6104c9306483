"""`tokenizer.model`, a tokenizer as PaddleX reads it: SentencePiece's protocol buffer.

Source: sentencepiece_model.proto of SentencePiece; pieces in order of their ids.
"""

import struct
from collections.abc import Iterable
from enum import IntEnum

# By number of the field: a BPE with byte fallback; ids of the unknown, start and end token.
_TRAINER = {3: 2, 35: 1, 40: 0, 41: 1, 42: 2}
# No space in front, none removed, all escaped.
_NORMALIZER = {3: 0, 4: 0, 5: 1}


class Kind(IntEnum):
    """What a piece is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    BYTE = 6


def sentencepiece_file(pieces: Iterable[tuple[str, Kind]]) -> bytes:
    """The content of the file of a BPE with byte fallback, whose first three pieces are the
    unknown, the start and the end token. Of two normal pieces the first is merged first."""
    model = b""
    for number, (text, kind) in enumerate(pieces):
        score = b"\x15" + struct.pack("<f", -number if kind is Kind.NORMAL else 0)
        model += _field(1, _field(1, text.encode()) + score + _numbers({3: kind}))
    return model + _field(2, _numbers(_TRAINER)) + _field(3, _numbers(_NORMALIZER))


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _numbers(values: dict[int, int]) -> bytes:
    return b"".join(_varint(number << 3) + _varint(value) for number, value in values.items())
