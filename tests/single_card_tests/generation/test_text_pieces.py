"""Text from token ids during generation."""

import pytest

from paddle_vl.families.vlm.inputs.tokenizer import TextTokenizer, train_bpe
from paddle_vl.generation.text_pieces import text_pieces


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
