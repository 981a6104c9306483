"""Rows of ShareGPT and LLaVA.

Guarantees: roles and pairs are read, tags and columns renamed; turns alternate; LLaVA's questions
lose white space and its answers keep it; what the tools skip or misread is refused.
"""

import json

import pytest

from paddle_vl.data.formats.keys import RowSettings
from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.data.formats.rows import flat, losses, said, shared

ANSWERED = [("user", "a"), ("assistant", "b")]


def test_turns_may_be_pairs_and_text():
    pairs = [{"human": "a", "assistant": "b"}, {"user": "c", "bot": "d"}]
    assert flat({"conversation": pairs})[2:] == [("user", "c"), ("assistant", "d")]
    assert flat({"conversations": json.dumps(pairs[:1])}) == ANSWERED


def test_only_the_last_turn_is_learned_if_history_is_masked():
    row = shared(("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"))
    assert losses(row, mask_history=True) == [False, True]


def test_white_space_around_questions_is_lost_in_llava_only():
    row = shared(("human", " <image>\n a "), ("gpt", " b "))
    assert flat({**row, "image": "i"})[0] == ("user", "i", "a")
    assert flat({**row, "image": "i"})[1] == ("assistant", " b ")
    assert flat({**row, "images": ["i"]})[0] == ("user", " ", "i", "\n a ")


TAGS = {"role_tag": "who", "content_tag": "what", "user_tag": "U", "assistant_tag": "A"}


def tagged(*turns, **entries):
    return {"talk": [{"who": role, "what": text} for role, text in turns], **entries}


def test_tags_and_columns_of_dataset_info_replace_the_defaults():
    settings = RowSettings(columns={"talk": "messages"}, only_columns=True, tags=TAGS)
    row = to_canonical(tagged(("U", "a"), ("A", "b"), system="not read"), settings)
    assert row.messages == to_canonical(said(*ANSWERED)).messages
    with pytest.raises(BadSampleError, match="'tags' does not name; it names"):
        to_canonical(tagged(("gpt", "a")), settings)
    with pytest.raises(ValueError, match="name role_tag and content_tag too"):
        RowSettings(tags={"user_tag": "U"})


def test_columns_rename_and_hide():
    row = {"ask": "a", "output": "b", "answer": "c"}
    assert flat(row, columns={"ask": "query", "answer": "_"}) == ANSWERED
    with pytest.raises(BadSampleError, match="has the key 'output' and another"):
        flat({"ask": "a", **row}, columns={"answer": "output"})


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (shared(("human", "a"), ("human", "b")), "bad_order"),
        (shared(("system", "a")), "no_target"),
        (shared(("bot", "a"), ("gpt", "b")), "bad_order"),
        (shared(("human", "a"), ("narrator", "b")), "unknown_role"),
        (shared(("human", "a"), ("gpt", "b"), images=["i"]), "tag_count"),
        (shared(("human", "a"), ("gpt", "b"), image="i"), "tag_count"),
        (shared(("human", "<image>"), ("assistant", "b"), image="i"), "unknown_role"),
        (shared(("human", "a"), ("gpt", None)), "missing_key"),
        ({"conversations": [{"from": "human", "role": "user", "value": "a"}]}, "unknown_role"),
    ],
)
def test_rows_that_the_tools_skip_or_misread_are_refused(row, kind):
    with pytest.raises(BadSampleError) as info:
        flat(row)
    assert info.value.kind == kind or "from" in info.value.reason
