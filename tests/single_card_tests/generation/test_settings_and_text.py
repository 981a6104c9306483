"""Generation settings, of HF's file too, and text from token ids during generation."""

import json

import pytest

from paddle_vl import GenerationConfig
from paddle_vl.families.vlm.inputs.tokenizer import TextTokenizer, train_bpe
from paddle_vl.generation.text_pieces import text_pieces

# As published with Qwen3-VL.
PUBLISHED = {
    "bos_token_id": 151643, "pad_token_id": 151643, "do_sample": True,
    "eos_token_id": [151645, 151643], "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.0,
    "temperature": 0.7, "transformers_version": "4.56.0",
}  # fmt: skip


def test_a_published_file_is_read(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(PUBLISHED))
    config = GenerationConfig.from_pretrained(tmp_path)
    assert config == GenerationConfig(
        do_sample=True, temperature=0.7, top_k=20, top_p=0.8, eos_token_id=[151645, 151643],
        pad_token_id=151643,
    )  # fmt: skip
    assert config.eos_token_ids == [151645, 151643]


def test_the_written_file_reads_back_and_holds_what_differs_from_the_defaults(tmp_path):
    config = GenerationConfig(
        max_new_tokens=9, do_sample=True, top_p=0.5, eos_token_id=(7, 8), seed=3
    )
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written == {
        "max_new_tokens": 9, "do_sample": True, "top_p": 0.5, "eos_token_id": [7, 8], "seed": 3,
    }  # fmt: skip
    assert GenerationConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_null_and_neutral_values_are_passed_over():
    values = {"num_beams": 1, "min_p": None, "top_k": None, "use_cache": True, "typical_p": 1.0}
    assert GenerationConfig.from_dict(values) == GenerationConfig()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"num_beams": 4, "min_p": 0.1},
            "no num_beams .*not supported.*no min_p .0.1",
        ),
        ({"temprature": 0.5}, "temprature is not a generation setting; did you mean temperature"),
        ({"top_p": 3}, "top_p is 3"),
    ],
)
def test_a_file_that_asks_for_more_is_refused_by_name_and_place(values, message, tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"{path}: .*{message}"):
        GenerationConfig.from_pretrained(tmp_path)


def test_the_fill_is_the_pad_token_or_the_first_ending_one():
    assert GenerationConfig(eos_token_id=[4, 5], pad_token_id=0).fill_token_id == 0
    assert GenerationConfig(eos_token_id=4).fill_token_id == 4
    assert GenerationConfig().fill_token_id is None
    # No matter without sampling.
    assert GenerationConfig(temperature=0.0).temperature == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens is 5 and max_new_tokens 4"),
        ({"do_sample": 1}, "do_sample is 1; it must be true or false"),
        ({"do_sample": True, "temperature": 0}, "temperature is 0; .*do_sample to false"),
        ({"do_sample": True, "temperature": -1.0}, "temperature is -1.0"),
        ({"do_sample": True, "temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"top_k": -1}, "top_k is -1; it must be at least 0"),
        ({"top_k": True}, "top_k is True"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"eos_token_id": [1, -2]}, r"eos_token_id is \[1, -2\]"),
        ({"eos_token_id": "<|im_end|>"}, "eos_token_id is '<|im_end|>'"),
        ({"pad_token_id": -1}, "pad_token_id is -1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_a_bad_value_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        GenerationConfig(**settings)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    """Bytes and few merges: characters beyond ASCII take several tokens."""
    return train_bpe(["the cat sat on the mat"], 270, ["<|im_end|>"])


def pieces(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    return list(text_pieces(ids, tokenizer.decode))


@pytest.mark.parametrize(
    "text",
    ["the cat", "\u4f60\u597d, \u4e16\u754c!", "a \U0001f600\U0001f680 b", "\u00e9t\n\nx", ""],
)
def test_pieces_are_the_text_and_never_a_torn_character(tokenizer, text):
    found = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(found) == text
    assert not any("\ufffd" in piece or piece == "" for piece in found)


def test_outer_space_special_tokens_and_torn_characters(tokenizer):
    ids = [*tokenizer.encode(" \n the  cat\n\nsat \n"), tokenizer.token_id("<|im_end|>")]
    assert "".join(pieces(tokenizer, ids)) == "the  cat\n\nsat"
    # One that never completes is shown at the end.
    ids = tokenizer.encode("a\u4f60")[:-1]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "a\ufffd"


def test_every_character_comes_with_its_last_token(tokenizer):
    ids = tokenizer.encode("\u4f60x\u597d")
    assert len(ids) == 7
    shown = []

    def one_at_a_time():
        for i, token_id in enumerate(ids):
            yield token_id
            shown.append((i, "".join(found)))

    found = []
    for piece in text_pieces(one_at_a_time(), tokenizer.decode):
        found.append(piece)
    assert [text for _, text in shown] == [
        "", "", "\u4f60", "\u4f60x", "\u4f60x", "\u4f60x", "\u4f60x\u597d",
    ]  # fmt: skip
