"""All-gathers of JSON values, and checks that settings agree on all ranks.

Values are sent as JSON; nothing received is unpickled, which could execute code of the sender.

All functions here are collective: every rank of the group calls them in the same order. Each
consists of all-gathers, and every rank gets the same result.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle
from xxhash import xxh3_64_hexdigest

from paddle_vl.parallel.collectives import gathered_arrays
from paddle_vl.parallel.store.membership import ranks_text


def gather_values(value: Any, group=None) -> list[Any]:
    """All-gather one value of JSON types per rank, which may differ; in the order of the group,
    by default of all ranks."""
    return [json.loads(text) for text in gather_bytes(json.dumps(value).encode(), group)]


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

    def told(values: list[Any]) -> str:
        return ", ".join(f"rank {rank} {value!r}" for rank, value in enumerate(values))

    _check_agree(
        settings,
        f"{where}: the ranks of this run do not have the same configuration",
        told,
        "Start all of them with the same file and the same overrides",
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

    def told(values: list[Any]) -> str:
        have, lack = ([r for r, has in enumerate(values) if bool(has) is x] for x in (True, False))
        return f"{ranks_text(have)} with it, {ranks_text(lack)} without"

    _check_agree(
        {name: True for name, is_there in fields.items() if is_there},
        f"{where}: the ranks of this run do not have the same optional fields in their data",
        told,
        "Give all of them the same kinds of data; a field that a sample has nothing for is there "
        "all the same, and masked",
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

    def told(values: list[Any]) -> str:
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        return f"{ranks_text(others)} unlike rank 0"

    _check_agree(
        {name: xxh3_64_hexdigest(json.dumps(value).encode()) for name, value in stream.items()},
        f"{where}: the ranks of this run do not read the same data",
        told,
        "Give all machines the same data files",
    )


def _check_agree(
    own: Mapping[str, Any], problem: str, told: Callable[[list[Any]], str], remedy: str
) -> None:
    """Raise ValueError for keys whose values differ between ranks; a missing one counts as None."""
    everyone = gather_values(dict(own))
    by_key = {
        key: [values.get(key) for values in everyone]
        for key in sorted({key for values in everyone for key in values})
    }
    differing = [
        f"{key} ({told(values)})"
        for key, values in by_key.items()
        if any(value != values[0] for value in values)
    ]
    if differing:
        raise ValueError(f"{problem}: {'; '.join(differing)}. {remedy}")
