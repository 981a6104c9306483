"""`tokenizer.model` of a small tokenizer: SentencePiece 0.2.3 reads it and splits 3000 texts of the
docs as tokenizer.json does; that it reads this one is pinned in its bytes."""

import json

from paddle_vl.families.paddleocr_vl.inputs.sentencepiece_file import Kind, sentencepiece_file
from paddle_vl.families.paddleocr_vl.inputs.tokenizer import train_tokenizer
from tests.support.document_run import make_processor


def test_pieces_scores_kinds_and_settings_are_where_sentencepiece_has_them():
    pieces = [("<unk>", Kind.UNKNOWN), ("<0x00>", Kind.BYTE), ("ab", Kind.NORMAL)]
    assert sentencepiece_file(pieces) == b"".join(
        [
            # Length; text; score, lower for what is merged later; kind.
            b"\x0a\x0e" b"\x0a\x05<unk>" b"\x15\x00\x00\x00\x00" b"\x18\x02",
            b"\x0a\x0f" b"\x0a\x06<0x00>" b"\x15\x00\x00\x00\x00" b"\x18\x06",
            b"\x0a\x0b" b"\x0a\x02ab" b"\x15\x00\x00\x00\xc0" b"\x18\x01",
            # BPE with byte fallback; ids of the unknown, start and end token.
            b"\x12\x0e" b"\x18\x02" b"\x98\x02\x01" b"\xc0\x02\x00" b"\xc8\x02\x01" b"\xd0\x02\x02",
            # No space in front, none removed, all escaped.
            b"\x1a\x06" b"\x18\x00" b"\x20\x00" b"\x28\x01",
        ]
    )  # fmt: skip


def test_a_small_tokenizer_has_the_file(tmp_path):
    make_processor().save_pretrained(tmp_path)
    model = (tmp_path / "tokenizer.model").read_bytes()
    places = [model.index(name.encode()) for name in ("<unk>", "<0x0A>", "\u2581", "<nl>")]
    assert places == sorted(places)


def test_any_two_pieces_merge_that_are_one_together():
    tokenizer = train_tokenizer(["ab", "ab", "ab", "abc", "abc", "bc", "bc", "bc"], 300, [])
    merges = json.loads(tokenizer.to_json())["model"]["merges"]
    assert merges == [["a", "b"], ["b", "c"], ["a", "bc"], ["ab", "c"]]
