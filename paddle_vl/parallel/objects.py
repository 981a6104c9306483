"""What ranks tell each other beside tensors: values as JSON and arrays as bytes.

Nothing that a rank receives is unpickled: that would run whatever code its sender chose.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

_PLAIN = (str, int, float, bool, type(None))


def gather_values(value: Any, group=None) -> list[Any]:
    """The values of all ranks of a group, in its order. Called by all of them together.

    Args:
        value: of JSON's types: what it holds must come back as it was.
        group: of all ranks if None.

    Raises:
        TypeError: a part of the value is not of JSON's types, such as a tuple or an array; names
            it.
    """
    _check_plain(value, "the value")
    return [json.loads(text) for text in gather_bytes(json.dumps(value).encode(), group)]


def gather_arrays(arrays: Mapping[str, np.ndarray], group=None) -> list[dict[str, np.ndarray]]:
    """The arrays of all ranks of a group, by name, in the group's order. Called by all together."""
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
    """The bytes of all ranks of a group, in its order. Called by all of them together."""
    sizes = [size.item() for size in _gather(np.array([len(data)], np.int64), group)]
    if not max(sizes):
        return [b"" for _ in sizes]
    # Ranks give tensors of one size to a collective.
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = _gather(padded, group)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def _gather(array: np.ndarray, group) -> list[np.ndarray]:
    everyone: list[paddle.Tensor] = []
    dist.all_gather(everyone, paddle.to_tensor(array), group)
    return [tensor.numpy() for tensor in everyone]


def _check_plain(value: Any, place: str) -> None:
    if type(value) is list:
        for number, each in enumerate(value):
            _check_plain(each, f"{place}[{number}]")
    elif type(value) is dict:
        for key, each in value.items():
            if type(key) is not str:
                raise TypeError(f"{place} has the key {key!r}; keys of JSON are text")
            _check_plain(each, f"{place}[{key!r}]")
    elif type(value) not in _PLAIN:
        raise TypeError(
            f"{place} is of {type(value).__name__}; ranks tell each other JSON: convert it to "
            "text, numbers, lists and dictionaries"
        )
