"""All-gathers of JSON values, and a check that values agree on all ranks.

Values are sent as JSON; nothing received is unpickled, which could execute code of the sender.

All functions here are collective: every rank of the group calls them in the same order. Each
consists of all-gathers, and every rank gets the same result.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle

from paddle_vl.parallel.collectives import gathered_arrays
from paddle_vl.parallel.store.membership import ranks_text


def gather_values(value: Any, group=None) -> list[Any]:
    """All-gather one value of JSON types per rank, which may differ; in the order of the group,
    by default of all ranks. First the lengths, then the padded texts."""
    data = json.dumps(value).encode()
    length = paddle.to_tensor(np.array([len(data)], np.int64))
    sizes = [size.item() for size in gathered_arrays(length, group)]
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = gathered_arrays(paddle.to_tensor(padded), group)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def check_agree(own: Mapping[str, Any], where: str, problem: str, remedy: str) -> None:
    """Check that all ranks have the same values.

    Args:
        own: JSON values; a missing key counts as null.
        where: coordinates of this rank, for the message.
        problem: what ranks do whose values differ, such as `do not have the same configuration`.
        remedy: what to do then.

    Raises:
        ValueError: on every rank; names each key that differs, with its values and their ranks.
    """
    everyone, differing = gather_values(dict(own)), []
    for key in sorted({key for values in everyone for key in values}):
        ranks: dict[str, list[int]] = {}
        for rank, values in enumerate(everyone):
            ranks.setdefault(repr(values.get(key)), []).append(rank)
        if len(ranks) > 1:
            told = ", ".join(f"{ranks_text(of)} {value}" for value, of in ranks.items())
            differing.append(f"{key} ({told})")
    if differing:
        raise ValueError(
            f"{where}: the ranks of this run {problem}: {'; '.join(differing)}. {remedy}"
        )
