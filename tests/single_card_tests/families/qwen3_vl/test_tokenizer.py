"""Tokenizer: HF's files and splits, special tokens by name, reproducible training."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.inputs.tokenizer import TextTokenizer, train_bpe
from tests.single_card_tests.families.qwen3_vl.chat_builders import TEXTS, tiny_tokenizer

SPECIAL = ("<|endoftext|>", "<|im_end|>")
TOKENIZER = train_bpe(TEXTS, 280, SPECIAL)


@given(st.text())
def test_any_text_survives_encoding_and_decoding(text):
    import unicodedata

    decoded = TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=False)
    assert decoded == unicodedata.normalize("NFC", text)


# How AutoTokenizer of transformers 5.24 splits, after NFC, whatever tokenizer.json says.
SPLITS = {
    "qwen3_vl": {
        "हिन्दी में": ["ह", "िन", "्द", "ी", " म", "ें"],
        "ที่นี่ 12": ["ท", "ี่", "น", "ี่", " ", "1", "2"],
        "x\u0327!\n y": ["x", "\u0327!\n", " y"],
    },
    "qwen3_5": {
        "हिन्दी में": ["हिन्दी", " में"],
        "ที่นี่ 12": ["ที่นี่", " ", "1", "2"],
        "x\u0327!\n y": ["x\u0327", "!\n", " y"],
    },
}


def pieces(tokenizer: TextTokenizer, text: str) -> list[str]:
    splitter = tokenizer.backend.pre_tokenizer
    return [text[begin:end] for _, (begin, end) in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_text_is_split_as_by_the_tokenizer_of_the_model(model_type, tmp_path):
    splits = SPLITS[model_type.removesuffix("_moe")]
    made = VLProcessor.from_texts(list(splits), 400, model_type=model_type)
    made.save_pretrained(tmp_path / "made")
    # Made without the type, and read beside the model, or for it.
    VLProcessor.from_texts(list(splits), 400).save_pretrained(tmp_path)
    given = VLProcessor.from_pretrained(tmp_path, model_type=model_type)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    read = (VLProcessor.from_pretrained(tmp_path / "made"), VLProcessor.from_pretrained(tmp_path))
    for processor in (made, given, *read):
        for text, expected in splits.items():
            assert pieces(processor.tokenizer, text) == expected
    settings = json.loads((tmp_path / "made" / "tokenizer_config.json").read_text())
    is_new = model_type.startswith("qwen3_5")
    assert settings["tokenizer_class"] == ("Qwen3_5Tokenizer" if is_new else "Qwen2Tokenizer")


def test_special_tokens_in_text_become_their_ids_and_can_be_left_out():
    ids = TOKENIZER.encode("hello<|im_end|>")
    assert ids[-1] == TOKENIZER.token_id("<|im_end|>")
    assert TOKENIZER.decode(ids) == "hello"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "hello<|im_end|>"


def test_training_depends_on_the_texts_only(tmp_path):
    for name, texts in (("a", TEXTS), ("b", TEXTS[::-1])):
        train_bpe(texts, 300, SPECIAL).save(tmp_path / name)
    first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in "ab")
    assert first == second


def test_vocabulary_keeps_to_its_size():
    assert TOKENIZER.vocab_size == 280
    with pytest.raises(ValueError, match="257 is too small.*258"):
        train_bpe(TEXTS, 257, SPECIAL)


def test_saved_tokenizer_is_read_from_its_file_and_its_directory(tmp_path):
    tiny_tokenizer().save(tmp_path)
    expected = tiny_tokenizer().encode("A cat. <|im_start|>")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert TextTokenizer.from_file(path).encode("A cat. <|im_start|>") == expected


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    tiny_tokenizer().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    path.write_text(json.dumps(content))
    assert len(TextTokenizer.from_file(tmp_path).encode("A cat on a mat.")) > 2


def test_missing_token_is_named_with_the_file(tmp_path):
    tiny_tokenizer().save(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer\.json has no token '<\|nothing\|>'"):
        TextTokenizer.from_file(tmp_path).token_id("<|nothing|>")
