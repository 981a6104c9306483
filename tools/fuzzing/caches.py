"""What the package keeps beside data files and in checkpoints: indexes, lengths, positions.

A damaged cache must change nothing: good documents are read as they are, and none is blamed.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

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
    indexes = in_file(name, damaged_bytes([seed]))
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

    def parse() -> None:
        shard = ShardOpener()(file)
        found = [shard.read(row)["tokens"] for row in range(shard.count)]
        if not np.array_equal(np.concatenate([*found, ids[:0]]), ids):
            raise AssertionError("documents overlap or are left out")

    # The head has 34 bytes; four-byte sizes and eight-byte places follow.
    numbers = st.sampled_from([*range(-3, 64), 120, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)])

    @st.composite
    def changed(draw) -> bytes:
        """The file with one or two other numbers."""
        data = bytearray(raw)
        for _ in range(draw(st.integers(1, 2))):
            width = draw(st.sampled_from([4, 8, 8]))
            at = draw(st.integers(9, len(data) - width))
            data[at : at + width] = (draw(numbers) % 256**width).to_bytes(width, "little")
        return bytes(data)

    inputs = st.one_of(changed(), changed(), damaged_bytes([raw]))
    return Parser(in_file(file.name, inputs), parse, ("tokens",))
