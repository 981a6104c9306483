"""Reading tokenizer.json.

Guarantees: a file whose tokenizer would later fail, run out of memory or draw tokens by chance is
refused by name.
"""

import json

import pytest

from paddle_vl.files.tokenizer_json import read_tokenizer


def write(file, vocab, unknown="[UNK]"):
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": unknown}
    file.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return file


def test_any_text_can_be_encoded(tmp_path):
    tokenizer = read_tokenizer(write(tmp_path / "tokenizer.json", {"[UNK]": 0, "a": 1}))
    assert tokenizer.encode("\u0378").ids == [0]


def test_tokenizer_without_its_unknown_token_is_refused(tmp_path):
    file = write(tmp_path / "tokenizer.json", {"a": 1})
    with pytest.raises(
        RuntimeError, match=r"tokenizer.json is not a tokenizer file: .*Missing \[UNK\] token"
    ) as error:
        read_tokenizer(file)
    assert "fetch or save it again" in str(error.value)


def test_huge_id_is_refused(tmp_path):
    file = write(tmp_path / "tokenizer.json", {"[UNK]": 0, "a": 2**24})
    with pytest.raises(RuntimeError, match=r"the id of 'a' is 16777216; at most 16777215"):
        read_tokenizer(file)
    write(file, {"[UNK]": 0, "a": 2**24 - 1})
    assert read_tokenizer(file).token_to_id("a") == 2**24 - 1


def test_dropout_of_merges_is_refused(tmp_path):
    """The same text would give other tokens each time."""
    file = tmp_path / "tokenizer.json"
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "dropout": 0.1}
    model |= {"unk_token": "a"}
    file.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(RuntimeError, match=r"json has model.dropout 0\.1: .*set it to null"):
        read_tokenizer(file)
    for none in (0.0, None):
        file.write_text(json.dumps({"added_tokens": [], "model": model | {"dropout": none}}))
        assert read_tokenizer(file).encode("ab").ids == [2]
