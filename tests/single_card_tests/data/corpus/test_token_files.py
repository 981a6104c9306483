"""What the `.idx` of token files may describe.

Guarantees: it is refused unless its documents are the whole `.bin`, each once and in order, and the
loss mask has a byte per token.
"""

import io
from pathlib import Path

import numpy as np
import pytest

from paddle_vl.data.corpus.token_files import TokenFileWriter
from tests.single_card_tests.data.corpus.corpus_files import opener


def write_tokens(folder: Path) -> None:
    with TokenFileWriter(folder / "a", 300) as writer:
        writer.add(np.arange(30), np.full(3, 10))


def index_parts(folder: Path) -> tuple[bytes, np.ndarray, np.ndarray, np.ndarray]:
    """Header, sizes, offsets and boundaries of three documents of ten tokens."""
    write_tokens(folder)
    raw = io.BytesIO((folder / "a.idx").read_bytes())
    return (
        raw.read(34), np.frombuffer(raw.read(12), "<i4").copy(),
        np.frombuffer(raw.read(24), "<i8").copy(), np.frombuffer(raw.read(32), "<i8").copy(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        (3, [0, 2, 1, 3], "document 2 does not begin where the one before ends"),
        (3, [1, 1, 2, 3], "document 0 does not begin where"),
        (3, [0, 1, 2, 2], "its documents have 2 of 3 sequences"),
        (3, [0, 1, 2, 4], "its documents have 4 of 3 sequences"),
        (3, [0, -1, 2, 3], "document 1 does not begin where"),
        (2, [0, 10, 40], "sequence 1 does not begin where the one before ends"),
        (2, [0, 30, 40], "sequence 1 does not begin where the one before ends"),
        (2, [20, 40, 60], "sequence 0 does not begin where the one before ends"),
        (1, [10, -10, 30], "sequence 1 does not begin where the one before ends"),
        (1, [10, 10, 9], "a.bin has 60 bytes and .*a.idx describes 58"),
    ],
)
def test_an_idx_whose_documents_overlap_or_leave_some_out_is_refused(
    tmp_path, part, values, message
):
    parts = list(index_parts(tmp_path))
    assert opener()(tmp_path / "a.idx").count == 3
    parts[part] = np.array(values, dtype=parts[part].dtype)
    (tmp_path / "a.idx").write_bytes(b"".join(bytes(each) for each in parts))
    with pytest.raises(RuntimeError, match=message) as error:
        opener()(tmp_path / "a.idx")
    assert "a.idx" in str(error.value)


def test_a_loss_mask_of_other_tokens_is_refused(tmp_path):
    write_tokens(tmp_path)
    (tmp_path / "a.lsm").write_bytes(bytes(29))
    with pytest.raises(RuntimeError, match=r"a\.lsm has 29 bytes and .*a\.idx describes 30"):
        opener()(tmp_path / "a.idx")
