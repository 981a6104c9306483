"""What the package keeps beside data files and in checkpoints: indexes, lengths, positions.

A damaged cache must change nothing: good documents are read as they are, and none is blamed.
"""

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from fuzzing.mutations import as_json, damaged_bytes, in_file, json_lines
from fuzzing.parser import Parser
from fuzzing.samples import small_processor
from paddle_vl.data.corpus.cache import FOLDER
from paddle_vl.data.corpus.opener import ShardOpener
from paddle_vl.data.corpus.token_files import TokenFileWriter
from paddle_vl.data.jsonl import BadSampleError, sample_at
from paddle_vl.data.packing import RowBudget
from paddle_vl.data.sample_lengths import sample_lengths
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset

_SUM = 8


def _with_sums(contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Files that end with a checksum, some of them with the right one behind damaged content."""
    right = contents.map(lambda content: content[:-_SUM] + xxh3_64_digest(content[:-_SUM]))
    return st.one_of(contents, right)


def offset_index(folder: Path) -> Parser:
    """An index beside its data file, either of which may be damaged."""
    rows = [{"text": f"a document {number}"} for number in range(8)]
    file, index = folder / "rows.jsonl", folder / FOLDER / "rows.jsonl.index"
    good = b"".join(as_json(row) + b"\n" for row in rows)
    file.write_bytes(good)
    times = (0, 10**18)

    def parse() -> None:
        # The data file is written anew for every input, and its index is of one time.
        os.utime(file, ns=times)
        shard = ShardOpener()(file)
        is_good, found = file.read_bytes() == good, []
        try:
            for row in range(min(shard.count, 20)):
                with sample_at(shard.place(row)):
                    found.append(shard.read(row))
        except BadSampleError as error:
            if is_good:
                raise AssertionError("a good document is blamed") from error
            raise
        if is_good and found != rows:
            raise AssertionError("good documents are read as others")

    parse()
    name = str(index.relative_to(folder))
    seed = index.read_bytes()
    indexes = in_file(name, _with_sums(damaged_bytes([seed])))
    texts = json_lines(rows, most_lines=8).map(lambda content: {file.name: content, name: seed})
    # Of the same size, so that only their content is other than the index says.
    edits = damaged_bytes([good]).map(
        lambda content: {file.name: (content + good[len(content) :])[: len(good)], name: seed}
    )
    return Parser(st.one_of(indexes, indexes, texts, edits), parse, ("rows",))


def lengths_cache(folder: Path) -> Parser:
    """Lengths of conversations beside their file, either of which may be damaged."""
    rows: list[Any] = [
        {"messages": [{"role": "user", "content": "hello"},
                      {"role": "assistant", "content": "hello " * (1 + number)}]}
        for number in range(6)
    ]  # fmt: skip
    file = folder / "train.jsonl"
    good = b"\n".join(map(as_json, rows))
    file.write_bytes(good)
    processor, times = small_processor(), (0, 10**18)

    def lengths() -> np.ndarray:
        os.utime(file, ns=times)
        dataset: Any = MessagesDataset([file], processor, 64)
        return sample_lengths(dataset, RowBudget(64)).tokens

    wanted = lengths()
    (cache,) = folder.glob(".*.npz")
    seed = cache.read_bytes()

    def parse() -> None:
        found = lengths()
        if file.read_bytes() == good and not np.array_equal(found, wanted):
            raise AssertionError("good samples have other lengths")

    damaged = in_file(cache.name, damaged_bytes([seed]))
    texts = in_file(file.name, json_lines(rows, most_lines=4))
    return Parser(st.one_of(damaged, damaged, texts), parse, ("train",))


def token_index(folder: Path) -> Parser:
    """The `.idx` of token files: what it describes is the whole `.bin`, in order."""
    ids, file = np.arange(1, 61), folder / "tokens.idx"
    with TokenFileWriter(folder / "tokens", 300) as writer:
        writer.add(ids, np.array([10, 0, 5, 20, 20, 5]))
    raw = file.read_bytes()
    head, count = raw[:34], 6
    sizes, offsets, bounds = raw[34:58], raw[58:106], raw[106:]

    def parse() -> None:
        shard = ShardOpener()(file)
        found = [shard.read(row)["tokens"] for row in range(shard.count)]
        if not np.array_equal(np.concatenate([*found, ids[:0]]), ids):
            raise AssertionError("documents overlap or are left out")

    numbers = st.integers(-3, 64) | st.sampled_from([-(2**31), 2**31 - 1, 2**31 - 8])
    large = numbers | st.sampled_from([-(2**63), 2**63 - 1, 2**32, 120])
    fields = st.tuples(
        st.sampled_from([1, 1, 1, 0, 2**63]), st.integers(0, 12) | st.just(8),
        st.just(count) | st.integers(0, 12) | st.just(2**63),
        st.just(count + 1) | st.integers(0, 12) | st.just(2**64 - 1),
    ).map(lambda values: head[:9] + struct.pack("<QBQQ", *values))  # fmt: skip

    def changed(packed: bytes, code: str, values: st.SearchStrategy[int]):
        known = list(struct.unpack(f"<{len(packed) // struct.calcsize(code)}{code}", packed))
        one = st.tuples(st.integers(0, len(known) - 1), values)
        return st.lists(one, max_size=2).map(
            lambda changes: struct.pack(
                f"<{len(known)}{code}", *(dict(changes).get(i, v) for i, v in enumerate(known))
            )
        )

    parts = st.tuples(
        st.just(head) | fields, st.just(sizes) | changed(sizes, "i", numbers),
        st.just(offsets) | changed(offsets, "q", large), changed(bounds, "q", large),
    ).map(b"".join)  # fmt: skip
    inputs = st.one_of(parts, parts, damaged_bytes([raw]))
    return Parser(in_file(file.name, inputs), parse, ("tokens",))
