"""All-gathers of JSON values and arrays, and checks that settings agree on all ranks.

Values are sent as JSON and arrays as bytes; nothing received is unpickled, which could execute code
of the sender.

All functions here are collective: every rank of the group calls them in the same order. Each
consists of all-gathers, and every rank gets the same result.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
from xxhash import xxh3_64_hexdigest

from paddle_vl.parallel.collectives import gathered_arrays
from paddle_vl.parallel.store.membership import ranks_text

_JSON_TYPES = (str, int, float, bool, type(None))


def gather_values(value: Any, group=None) -> list[Any]:
    """All-gather one JSON value per rank; in the order of the group.

    Args:
        value: of JSON types; may differ per rank.
        group: default all ranks.

    Raises:
        TypeError: the value contains another type, such as a tuple or an array.
    """
    _check_json(value, "the value")
    return [json.loads(text) for text in gather_bytes(json.dumps(value).encode(), group)]


def gather_arrays(arrays: Mapping[str, np.ndarray], group=None) -> list[dict[str, np.ndarray]]:
    """All-gather named arrays of any number, shape and dtype per rank; in the group's order."""
    heads = gather_values(
        [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()], group
    )
    own = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    everyone = []
    for head, data in zip(heads, gather_bytes(own, group), strict=True):
        found, start = {}, 0
        for name, dtype, shape in head:
            count = math.prod(shape)
            found[name] = np.frombuffer(data, dtype, count, start).reshape(shape)
            start += found[name].nbytes
        everyone.append(found)
    return everyone


def gather_bytes(data: bytes, group=None) -> list[bytes]:
    """All-gather bytes of any length per rank: first the lengths, then the padded bytes."""
    length = paddle.to_tensor(np.array([len(data)], np.int64))
    sizes = [size.item() for size in gathered_arrays(length, group)]
    if not max(sizes):
        return [b"" for _ in sizes]
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = gathered_arrays(paddle.to_tensor(padded), group)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def check_settings_agree(settings: Mapping[str, Any], where: str) -> None:
    """Check that all ranks have the same settings.

    Args:
        settings: flat, by dotted key; values of JSON types.
        where: coordinates of this rank, for the message.

    Raises:
        ValueError: on every rank; names each key that differs with the values of all ranks.
    """
    everyone = gather_values(dict(settings))
    differing = []
    for key in _differing(everyone):
        values = [settings.get(key) for settings in everyone]
        by_rank = ", ".join(f"rank {rank} {value!r}" for rank, value in enumerate(values))
        differing.append(f"{key} ({by_rank})")
    if differing:
        raise ValueError(
            f"{where}: the ranks of this run do not have the same configuration: "
            + "; ".join(differing)
            + ". Start all of them with the same file and the same overrides"
        )


def check_fields_agree(fields: Mapping[str, bool], where: str) -> None:
    """Check that the data of all ranks has the same optional fields.

    Ranks that shard parameters run the same layers for every field of the data, filled or masked.
    The fields are configured per data set, so they are checked once, not per step.

    Args:
        fields: whether this rank's samples have each field; a missing name counts as False.
        where: coordinates of this rank, for the message.

    Raises:
        ValueError: on every rank; names each field that only some have, and those ranks.
    """
    everyone = gather_values({name: True for name, is_there in fields.items() if is_there})
    differing = []
    for name in _differing(everyone):
        have = [rank for rank, fields in enumerate(everyone) if name in fields]
        lack = [rank for rank, fields in enumerate(everyone) if name not in fields]
        differing.append(f"{name} ({ranks_text(have)} with it, {ranks_text(lack)} without)")
    if differing:
        raise ValueError(
            f"{where}: the ranks of this run do not have the same optional fields in their "
            "data: " + "; ".join(differing) + ". Give all of them the same kinds of data; a field "
            "that a sample has nothing for is there all the same, and masked"
        )


def check_data_agree(stream: Mapping[str, Any], where: str) -> None:
    """Check that all ranks read the same data, so that they continue or refuse a checkpoint
    together.

    Args:
        stream: what determines the samples and their order; JSON values.

    Raises:
        ValueError: on every rank; names each key that differs, and the ranks that differ from
            rank 0.
    """
    own = {name: xxh3_64_hexdigest(json.dumps(value).encode()) for name, value in stream.items()}
    everyone = gather_values(own)
    differing = []
    for name in _differing(everyone):
        hashes = [values.get(name) for values in everyone]
        others = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
        differing.append(f"{name} ({ranks_text(others)} unlike rank 0)")
    if differing:
        raise ValueError(
            f"{where}: the ranks of this run do not read the same data: {'; '.join(differing)}. "
            "Give all machines the same data files"
        )


def _differing(everyone: list[Mapping[str, Any]]) -> list[str]:
    """Sorted keys whose values differ between ranks; a missing one counts as None."""
    keys = sorted({key for values in everyone for key in values})
    return [key for key in keys if any(v.get(key) != everyone[0].get(key) for v in everyone)]


def _check_json(value: Any, place: str) -> None:
    if type(value) is list:
        for number, each in enumerate(value):
            _check_json(each, f"{place}[{number}]")
    elif type(value) is dict:
        for key, each in value.items():
            if type(key) is not str:
                raise TypeError(f"{place} has the key {key!r}; keys of JSON are text")
            _check_json(each, f"{place}[{key!r}]")
    elif type(value) not in _JSON_TYPES:
        raise TypeError(
            f"{place} is of {type(value).__name__}; ranks exchange JSON: convert it to "
            "text, numbers, lists and dictionaries"
        )
