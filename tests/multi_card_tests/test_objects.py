"""What ranks tell each other as JSON and arrays, over 3 real processes.

Guarantees: values of any length come back as they were, in the order of the ranks, over all and in
a group of some; arrays with dtype, shape and bits, also empty ones and none; what JSON would change
is refused by the place that holds it, before anything is sent.
"""

import math

import numpy as np
import paddle.distributed as dist
import pytest

from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.objects import gather_arrays, gather_bytes, gather_values
from paddle_vl.parallel.topology import initialize
from tests.support.launch import launch, outcome_of, run_checks

VALUES = [
    {"text": "Bär \U0001f43b", "numbers": [1, -2, 0.1, 10**30], "nested": {"": [None, True]}},
    "x" * 70_000,
    None,
]


def arrays_of(rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rank)
    arrays = {
        "bits": rng.integers(0, 1 << 16, (rank + 1, 3)).astype(np.uint16),
        "transposed": rng.standard_normal((2, rank + 2)).astype(np.float32).T,
        "empty": np.zeros((0, 4), np.int64),
        "scalar": np.array(float("nan")),
    }
    return {} if rank == 1 else arrays


def worker() -> dict:
    rank = initialize(ParallelDegrees(dp_degree=3)).rank
    pair = dist.new_group([0, 2])
    in_pair = (lambda value: gather_values(value, pair)) if rank != 1 else (lambda value: [])
    return run_checks(
        {
            "values": lambda: gather_values(VALUES[rank]),
            "pair": lambda: in_pair({"rank": rank}),
            "not finite": lambda: gather_values([math.inf, rank]),
            "bytes": lambda: gather_bytes(bytes([rank]) * rank),
            "nothing": lambda: gather_bytes(b""),
            "arrays": lambda: gather_arrays(arrays_of(rank)),
        }
    )


@pytest.fixture(scope="module")
def outcomes():
    return launch(worker, 3)


def test_values_come_back_as_they_were(outcomes):
    assert outcome_of(outcomes, "values") == [VALUES] * 3
    assert outcome_of(outcomes, "pair") == [
        [{"rank": 0}, {"rank": 2}],
        [],
        [{"rank": 0}, {"rank": 2}],
    ]
    assert outcome_of(outcomes, "not finite") == [[[math.inf, rank] for rank in range(3)]] * 3


def test_bytes_of_different_lengths_come_back(outcomes):
    assert outcome_of(outcomes, "bytes") == [[b"", b"\1", b"\2\2"]] * 3
    assert outcome_of(outcomes, "nothing") == [[b"", b"", b""]] * 3


def test_arrays_come_back_bit_for_bit(outcomes):
    for everyone in outcome_of(outcomes, "arrays"):
        for rank, found in enumerate(everyone):
            wanted = arrays_of(rank)
            assert list(found) == list(wanted)
            for name, array in wanted.items():
                assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
                assert found[name].tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, (2, 3)]}, r"the value\['a'\]\[1\] is of tuple"),
        ({1: "a"}, "the value has the key 1; keys of JSON are text"),
        ([np.float32(1)], r"the value\[0\] is of float32"),
        (np.zeros(2), "the value is of ndarray"),
        ({"a": b"x"}, r"the value\['a'\] is of bytes"),
    ],
)
def test_what_json_would_change_is_refused(value, message):
    with pytest.raises(TypeError, match=message):
        gather_values(value)
