"""One rank reads for its lane: the loaders of two ranks in one process.

Guarantees: the other rank gets the reader's batches, bad samples skipped alike, without a look at
the data; arrays lie in shared memory, and what one rank writes the other does not see; values of
all kinds arrive as they are, a part of an array without the pages of the rest, and what cannot be
shared is named; positions continue alike; an error
of the reader ends both, and so does the end of the reader; a rank that waits says for whom and can
leave the wait.
"""

import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_vl.data import lane_share
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.lane_share import LaneShare
from paddle_vl.data.loader import PrefetchLoader
from tests.single_card_tests.data.probe_datasets import NumberDataset

TRAINING = {"shuffle": True, "drop_last": True, "seed": 3}


def arrays(samples: list) -> dict:
    return {
        "pixels": np.concatenate([sample["number"] for sample in samples]),
        "empty": np.zeros(0),
    }


def resident_bytes(address: int) -> int:
    """Bytes that this process has looked at, of the mapping with that address."""
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    for line in lines:
        begin, _, end = line.split(" ", 1)[0].partition("-")
        if end and int(begin, 16) <= address < int(end, 16):
            (rss,) = islice((rest.split()[1] for rest in lines if rest.startswith("Rss:")), 1)
            return 1024 * int(rss)
    raise LookupError(hex(address))


class UnreadDataset(NumberDataset):
    def __getitem__(self, number: int) -> dict:
        raise AssertionError("the other rank reads")


def two_ranks(of_reader: NumberDataset, num_workers: int = 0) -> list[PrefetchLoader]:
    connections = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other = UnreadDataset(of_reader.size, (), of_reader.on_bad_sample)
    loaders = []
    for dataset, connection in zip((of_reader, other), connections, strict=True):
        loader = PrefetchLoader(dataset, arrays, 2, num_workers=num_workers, **TRAINING)
        loader.share = LaneShare(4, [connection], reads=not loaders)
        loaders.append(loader)
    return loaders


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_batches_and_skipped_samples_are_those_of_the_reader(num_workers):
    reader, other = two_ranks(NumberDataset(7, {2, 5}, "skip"), num_workers)
    with reader, PrefetchLoader(NumberDataset(7, {2, 5}, "skip"), arrays, 2, **TRAINING) as alone:
        for _ in range(5):
            batch, wanted = next(reader), next(alone)
            found = next(other)
            assert found["pixels"].tolist() == wanted["pixels"].tolist()
            found["pixels"][:] = -1
            assert batch["pixels"].tolist() == wanted["pixels"].tolist()
            assert other.state_dict() == reader.state_dict() == alone.state_dict()
    assert other.skipped == alone.skipped
    assert not other._pools
    assert reader.share.num_bytes == other.share.num_bytes > 0


def test_both_continue_at_a_position():
    batches = [next(PrefetchLoader(NumberDataset(9), arrays, 2, **TRAINING)) for _ in range(1)]
    loaders = two_ranks(NumberDataset(9))
    for loader in loaders:
        assert next(loader)["pixels"].tolist() == batches[0]["pixels"].tolist()
    state = loaders[0].state_dict()
    again = [next(loader)["pixels"].tolist() for loader in loaders]
    for loader in loaders:
        loader.load_state_dict(state, 1)
    assert [next(loader)["pixels"].tolist() for loader in loaders] == again


def test_a_rank_reads_the_part_of_an_array_that_it_takes():
    whole = np.zeros(32 << 20, dtype=np.uint8)
    found = made_by_both({"pixels": whole})["pixels"]
    before = resident_bytes(found.ctypes.data)
    found[8 << 20 : 12 << 20].sum()
    # The kernel maps some pages around those that are read.
    assert 4 << 20 <= resident_bytes(found.ctypes.data) - before < 5 << 20
    assert before < 1 << 20


def made_by_both(value: Any) -> Any:
    """What the other rank gets of a value that the reader makes."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reader, other = (LaneShare(4, [end], reads=end is pair[0]) for end in pair)
    reader.made("batch 0", lambda: value, lambda: None, {})
    return other.made("batch 0", lambda: None, lambda: None, {})


def test_values_of_all_kinds_arrive_as_they_are():
    value: Any = {
        (1, "a"): [None, True, -0.5, "é"],
        3: ((), {}, []),
        "empty": np.zeros([2, 0], "int8"),
    }
    value |= {"number": np.float32(0.1), "half": np.array([1.5, float("nan")], "float16")}
    found = made_by_both(value)
    assert repr(found) == repr(value)
    assert [found[key].dtype for key in ("empty", "number", "half")] == ["int8", "f4", "f2"]


def test_a_value_that_cannot_be_shared_is_named():
    with pytest.raises(
        TypeError, match=r"a batch has set \{1\}, which ranks .* make it of numbers"
    ):
        made_by_both({"numbers": {1}})


def test_an_error_of_the_reader_ends_both_with_its_message():
    messages = []
    for loader in two_ranks(NumberDataset(2, {0})):
        with pytest.raises(BadSampleError, match=r"data.jsonl:1: this one is bad") as caught:
            next(loader)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_reader_that_has_ended_is_named():
    reader, other = two_ranks(NumberDataset(4))
    reader.share.connections[0].close()
    with pytest.raises(RuntimeError, match="rank 4, which reads .* has ended before batch 0"):
        next(other)
    # The reader goes on; its next collective ends it.
    assert len(next(reader)["pixels"]) == 2


def test_who_waits_says_for_whom_and_may_leave(monkeypatch):
    monkeypatch.setattr(lane_share, "CALL_S", 0.01)
    reader, other = two_ranks(NumberDataset(4))
    other.while_waiting = told = lambda: pytest.fail(other.waiting_for())
    with pytest.raises(pytest.fail.Exception, match="batch 0 of epoch 0; rank 4 prepares it for"):
        next(other)
    other.while_waiting = lambda: None
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(next, other)
        assert next(reader)["pixels"].tolist() == found.result()["pixels"].tolist()
    assert told is not other.while_waiting
