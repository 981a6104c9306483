"""What the package keeps beside data files: indexes and lengths.

Guarantees: see `checking.check`. A damaged cache changes nothing: good documents are read as they
are, and none is blamed.
"""

import os
from typing import Any

import numpy as np
from hypothesis import strategies as st

from paddle_vl.data.corpus.cache import FOLDER
from paddle_vl.data.corpus.opener import ShardOpener
from paddle_vl.data.corpus.token_files import TokenFileWriter
from paddle_vl.data.jsonl import BadSampleError, sample_at
from paddle_vl.data.packing import RowBudget
from paddle_vl.data.sample_lengths import sample_lengths
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset
from tests.single_card_tests.damaged.checking import check
from tests.single_card_tests.damaged.damage import (
    as_json,
    damaged,
    in_file,
    json_lines,
    one_damaged,
)
from tests.single_card_tests.families.qwen3_vl.chat_builders import question, tiny_processor

TIMES = (0, 10**18)


def test_index_beside_a_data_file(folder):
    rows = [{"text": f"a document {number}"} for number in range(8)]
    file, index = folder / "rows.jsonl", folder / FOLDER / "rows.jsonl.index"
    good = b"".join(as_json(row) + b"\n" for row in rows)
    file.write_bytes(good)

    def parse() -> None:
        # The data file is written anew for every input, and its index is of one time.
        os.utime(file, ns=TIMES)
        shard = ShardOpener()(file)
        is_good, found = file.read_bytes() == good, []
        try:
            for row in range(min(shard.count, 20)):
                with sample_at(shard.place(row)):
                    found.append(shard.read(row))
        except BadSampleError:
            if not is_good:
                raise
        # No good document is blamed.
        assert found == rows or not is_good

    parse()
    name, seed = str(index.relative_to(folder)), index.read_bytes()
    # Also of the same size, so that only their content is other than the index says.
    same_size = damaged([good]).map(lambda text: (text + good[len(text) :])[: len(good)])
    edited = st.one_of(same_size, json_lines(rows, 8))
    inputs = [
        in_file(name, damaged([seed])),
        edited.map(lambda text: {file.name: text, name: seed}),
    ]
    check(folder, parse, st.one_of(inputs), "rows")


def test_lengths_beside_a_data_file(folder):
    rows = [question("hello", "hello " * number) for number in range(1, 7)]
    file, processor = folder / "train.jsonl", tiny_processor()
    good = b"".join(as_json(row) + b"\n" for row in rows)
    file.write_bytes(good)

    def lengths() -> np.ndarray:
        os.utime(file, ns=TIMES)
        dataset: Any = MessagesDataset([file], processor, 64)
        return sample_lengths(dataset, RowBudget(64)).tokens

    wanted = lengths()

    def parse() -> None:
        found = lengths()
        assert file.read_bytes() != good or np.array_equal(found, wanted)

    check(folder, parse, one_damaged(folder), "train")


def test_index_of_token_files(folder):
    """What it describes is the whole `.bin`, in order."""
    ids, file = np.arange(1, 61), folder / "tokens.idx"
    with TokenFileWriter(folder / "tokens", 300) as writer:
        writer.add(ids, np.array([10, 0, 5, 20, 20, 5]))
    raw = file.read_bytes()

    def parse() -> None:
        shard = ShardOpener()(file)
        found = [shard.read(row)["tokens"] for row in range(shard.count)]
        assert np.array_equal(np.concatenate([*found, ids[:0]]), ids)

    # The head has 34 bytes; four-byte sizes and eight-byte places follow.
    numbers = st.sampled_from([*range(-3, 64), 120, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)])
    widths = st.sampled_from([4, 8, 8])

    def changed(at: int, number: int, width: int) -> bytes:
        return raw[:at] + (number % 256**width).to_bytes(width, "little") + raw[at + width :]

    one = st.builds(changed, st.integers(9, len(raw) - 8), numbers, widths)
    check(folder, parse, in_file(file.name, st.one_of(one, damaged([raw]))), "tokens")
