"""Text from token ids during generation.

Guarantees: the joined pieces equal the text of all ids without outer space; characters are not
split, and one that never completes is still shown; complete text is shown at once.
"""

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
    [
        "the cat",
        "\u4f60\u597d, \u4e16\u754c!",
        "a \U0001f600\U0001f680 b",
        "\u00e9t\u00e9\n\nx",
        "",
    ],
)
def test_pieces_are_the_text_and_never_a_torn_character(tokenizer, text):
    found = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(found) == text
    assert not any("\ufffd" in piece or piece == "" for piece in found)


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


def test_outer_space_is_left_out_and_inner_space_kept(tokenizer):
    ids = tokenizer.encode(" \n the  cat\n\nsat \n")
    assert "".join(pieces(tokenizer, ids)) == "the  cat\n\nsat"


def test_a_character_that_never_completes_is_shown_at_the_end(tokenizer):
    ids = tokenizer.encode("a\u4f60")[:-1]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "a\ufffd"


def test_special_tokens_show_nothing(tokenizer):
    ids = [*tokenizer.encode("mat"), tokenizer.token_id("<|im_end|>")]
    assert "".join(pieces(tokenizer, ids)) == "mat"
