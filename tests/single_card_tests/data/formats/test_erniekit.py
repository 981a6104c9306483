"""Rows of ERNIEKit.

Guarantees: labels, the system text and the order of media are honoured; media are the user's;
places that are not there, unequal lists and blank texts are refused.
"""

import pytest

from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.data.formats.rows import CALL, flat, losses


def info(*texts, **entries):
    tags = {"u": "mask", "a": "no_mask"}
    return {"text_info": [{"text": text, "tag": tags[text[0]]} for text in texts], **entries}


def at(*places, url="i"):
    return [{"matched_text_index": each, "image_url": f"{url}{n}"} for n, each in enumerate(places)]


def test_labels_and_the_system_text_are_honoured():
    row = {"src": ["s", "u1", "u2"], "tgt": ["-", "a1", "a2"], "is_system": 1, "label": [1, 0, 1]}
    assert [text for _, text in flat(row)] == ["s", "u1", "a1", "u2", "a2"]
    assert losses(row) == [False, True]
    assert flat({"src": "u", "tgt": "a", "is_system": 0}) == [("user", "u"), ("assistant", "a")]


def test_media_stand_before_their_text_and_are_the_users():
    row = info("u1", "u2", "a1", "a2", image_info=at(1, 1, 3))
    users = ("user", "u1", "i0", "i1", "u2")
    assert flat(row) == [users, ("assistant", "a1"), ("user", "i2"), ("assistant", "a2")]


def test_order_places_images_and_videos():
    order = {"type": ["video", "text", "image", "text"], "index": [0, 0, 0, 1]}
    row = info("u", "a", image_info=at(0), video_info=at(1, url="v"), order=order)
    assert flat(row) == [("user", "v0", "u", "i0"), ("assistant", "a")]


def test_calls_and_answers_of_tools_are_read():
    row = info("u", "a", "u1", "a2")
    row["text_info"][1] |= {"tool_calls": [CALL], "text": ""}
    row["text_info"][2] |= {"tool_response": True}
    messages = to_canonical(row).messages
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1].get("tool_calls") == [CALL]


ORDER = {"type": ["text", "text"], "index": [0, 0]}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"src": ["u"], "tgt": ["a", "b"]}, "bad_order"),
        ({"src": ["u"], "tgt": [" "]}, "empty_answer"),
        ({"src": ["u"], "tgt": ["a"], "label": [2]}, "bad_target"),
        (info("u", "a", image_info=at(2)), "bad_order"),
        (info("u", "a", image_info=at(0), video_info=at(0)), "ambiguous"),
        (info("u", "a", order=ORDER), "bad_order"),
        (info("u", "a", is_system=1), "ambiguous"),
        (info("u", "a", image_info=[{"image_url": "i", "width": 1}]), "unknown_key"),
        ({"text_info": [{"text": "u", "tag": "user"}]}, "unknown_role"),
        ({"text_info": [{"text": "u", "tag": "mask", "tool_calls": [CALL]}]}, "bad_tool_call"),
    ],
)
def test_rows_that_would_be_guessed_at_are_refused(row, kind):
    with pytest.raises(BadSampleError) as info:
        flat(row)
    assert info.value.kind == kind, info.value
