"""Rows of messages.

Guarantees: every spelling of content, media and targets gives the same canonical form; consecutive
messages of the assistant are one turn; what cannot be honoured is refused with its remedy.
"""

import base64

import numpy as np
import pytest

from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.data.formats.rows import chat, flat, losses, said

URI = "data:image/png;base64," + base64.b64encode(b"PNG").decode()
SOURCES = [
    ("a.png", "a.png"), ("file:///b.png", "/b.png"), (URI, b"PNG"), ("https://x/a.png",) * 2,
    ({"path": "a.png", "bytes": None}, "a.png"), ({"path": "a.png", "bytes": b"x"}, b"x"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "source"), SOURCES)
def test_a_source_is_read_in_every_place(given, source):
    wanted = [("user", source, "See"), ("assistant", "A cat.")]
    parts = [{"type": "image"}, {"type": "text", "text": "See", "image": None}]
    assert flat(chat("<image>See", images=[given])) == wanted
    assert flat(chat("See", image=given)) == wanted
    assert flat(chat(parts, images=[given])) == wanted
    for key in ("image", "image_url", "url"):
        assert flat(chat([{"type": "image", key: given}, parts[1]])) == wanted
    if isinstance(given, str):
        url = {"url": given, "detail": "high"}
        assert flat(chat([{"type": "image_url", "image_url": url}, parts[1]])) == wanted


def test_objects_in_memory_are_passed_on():
    image = np.zeros((2, 2, 3), np.uint8)
    assert flat(chat("<image>", images=[image]))[0][1] is image


def test_a_video_may_be_a_list_of_frames():
    assert flat(chat("<video>", videos=[["a.png", URI]]))[0] == ("user", ["a.png", b"PNG"])
    assert flat(chat("<video><video>", videos=["a.mp4", "b.mp4"]))[0] == ("user", "a.mp4", "b.mp4")


def test_media_without_any_tag_come_first_and_videos_before_images():
    row = said(("system", "s"), ("user", "u"), ("assistant", "a"), images=["i"], videos=["v"])
    assert flat(row)[1] == ("user", "v", "i", "u")


def test_tags_within_parts_are_text():
    parts = [{"type": "text", "text": "<image> <bbox>"}, {"type": "text", "text": "!"}]
    assert flat(chat(parts))[0] == ("user", "<image> <bbox>!")


def test_consecutive_messages_of_the_assistant_are_one_turn():
    row = said(("user", "q"), ("assistant", "a"), ("assistant", " b"), label=[0, 0])
    assert flat(row)[1:] == [("assistant", "a b")]
    assert losses(row) == losses({**row, "label": [0]}) == [False]


@pytest.mark.parametrize(
    ("flags", "entries", "learned"),
    [
        ({"loss": 0}, {}, [False, True]),
        ({"weight": 1.0, "loss": None}, {"label": [1, 0]}, [True, False]),
        ({"loss_scale": 0.0}, {"label": []}, [False, True]),
        ({}, {"label": [0, 1]}, [False, True]),
    ],
)
def test_keys_say_which_turns_are_targets(flags, entries, learned):
    row = said(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), **entries)
    row["messages"][1] |= flags
    assert losses(row) == learned
    assert losses(row, mask_history=True) == [False, learned[1]]


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_three_names(key):
    row = chat()
    row["messages"][1] |= {key: "Hm.", "thinking": "Hm."}
    assert to_canonical(row).messages[1].get("reasoning_content") == "Hm."


def answered(**entries):
    row = chat()
    row["messages"][1] |= entries
    return row


REFUSED = {
    "tag_count": [
        (chat("<image>"), "1 image place.* but 0 entries"),
        (chat("<image>", images=["a", "b"]), "1 image place.* but 2 entries"),
        (chat("<video>", videos=["a"], images=["b"]), "0 image place.* but 1 entries"),
        (chat("a", "<image>", images=["a"]), "message 2 has role 'assistant' and a part"),
    ],
    "remote": [(chat("<image>", images=["data:image/png,x"]), "data URI.*base64")],
    "unsupported": [
        (chat("<audio>"), "audio is not supported"),
        (chat("<bbox>"), "message 1 has the tag <bbox>.*'objects'"),
        (chat([{"type": "input_audio"}]), "has the part"),
        (chat([{"type": "video", "video": "a", "fps": 1}]), "fps.*set data.video_fps"),
        (chat([{"type": "video", "video": ["a"], "sample_fps": 1}]), "sample_fps.*data.video_fps"),
        (chat(history=[["a", "b"]]), "'history' beside 'messages' is not read"),
        (chat(chat_template_kwargs={"max_pixels": 1}), "cannot be set for one row"),
        (chat(enable_thinking=False), "'chat_template_kwargs'"),
        (answered(function_call={"name": "a"}), "write it as 'tool_calls'"),
        (answered(train=False), "'train', which is not read: use 'loss'"),
        (answered(rejected_content="a"), "message 2 has 'rejected_content', .*preference"),
        (chat("where?", "the <ref-object> there"), "message 2 has the tag <ref-object>"),
        (chat(functions=[{"name": "f"}]), "'functions', which is not read: .*'tools'"),
        (chat(weight=0.5), "'weight', which is read of messages"),
        (chat(mask=[0, 1]), "'mask', which .*: give 'loss'"),
        (chat(query="a"), "'query' beside 'messages' is not read: write its turns"),
        (chat([{"type": "image", "image": "a", "max_pixels": 9}]), "max_pixels.*data.max_pixels"),
    ],
    "unknown_key": [
        (chat([{"type": "text", "text": "a", "hue": 1}]), "a part of type text .*'hue'"),
        (answered(los=True), r"message 2 has the unknown key 'los' \(is 'loss' meant\?\)"),
        (chat("<image>", images=[{"path": "a", "fps": 1}]), "a source has the unknown key 'fps'"),
        (said(("tool", "a")) | {"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]},
         "only a message of role 'assistant'"),
    ],
    "bad_target": [
        (answered(loss_scale=0.5), r"'loss_scale' '0\.5'; true or false"),
        (answered(loss=True, weight=0), "'loss' True, 'weight' False; keep one"),
        (answered(loss="false"), "message 2 has 'loss' 'false'; true or false"),
        ({"messages": [{"role": "user", "content": "a", "loss": True}]}, "only an assistant's"),
        (chat(label=[2]), "'label' with '2'"),
        ({**answered(loss=False), "label": [1]}, "the record's 'label' True, 'loss' False"),
        (chat(label=[1, 0]), "'label' has 2 values for 1 assistant messages"),
        (said(("user", "a"), ("assistant", "b"), ("assistant", "c"), label=[0, 1]),
         "only one is a training target"),
    ],
    "ambiguous": [
        (answered(thinking="a", reasoning="b"), "thinking, reasoning with different texts"),
        (answered(thinking="a", content="<think>b</think>"), "and a <think> in its content"),
        (chat(image="a", images=["b"]), "'images' and 'image': keep one"),
        (chat([{"type": "image", "url": "a", "image": "b"}]), "several sources"),
    ],
    "two_systems": [
        (said(("system", "a"), ("user", "b"), system="c"), "keep one of them"),
        (chat(system="a", system_prompt="b"), "keep one of them"),
    ],
    "unknown_role": [
        (said(("developer", "a")), "write it as 'system'"),
        (said((["user"], "b")), "role .*'user'.*; use one of system"),
        (said(("user", "a"), ("system", "b")), "message 2 has role 'system'"),
    ],
    "special_token": [
        (chat("<|box_start|>"), r"special token\(s\) <\|box_start\|>"),
        (chat(system="<|im_end|>"), "im_end"),
        (chat(chat_template_kwargs={"a": "<|im_end|>"}), "im_end"),
        (answered(thinking="<|im_end|>"), "im_end"),
    ],
    "missing_key": [
        (chat("a", None), "message 2 has no 'content'"),
        ({"messages": "[1"}, "must be a list with at least one message"),
        ({"messages": []}, "must be a list with at least one message"),
        ({"messages": ["hello"]}, "message 1 is a str"),
        ({"messages": [{"content": "b"}]}, "message 1 has no 'role'"),
        (chat(3), "content of type int"),
        (chat(system=["a"]), "'system' is of type list; a string"),
        (chat("<image>", images=3), "a list of images is needed"),
        (chat("<video>", videos=[{"bytes": None}]), "video source .* is not a path"),
        (chat("<image>", images=[{}]), "image source .* is not a path"),
    ],
    "bad_text": [(chat("\ud800"), "half of a surrogate pair")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "row", "reason"),
    [(kind, *case) for kind, cases in REFUSED.items() for case in cases],
)
def test_what_cannot_be_honoured_is_refused(kind, row, reason):
    with pytest.raises(BadSampleError, match=reason) as info:
        flat(row, control_tokens=["<|im_end|>"])
    assert info.value.kind == kind


def test_tokens_of_boxes_are_text_if_allowed():
    assert flat(chat("<|box_start|>"), special_tokens=["box"])[0] == ("user", "<|box_start|>")


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (said(("user", "a")), "no_assistant"),
        (chat(label=[0]), "no_target"),
        (chat("a", ""), "empty_answer"),
    ],
)
def test_a_row_without_a_target_is_refused_for_training(row, kind):
    canonical = to_canonical(row)
    with pytest.raises(BadSampleError) as info:
        canonical.check_targets()
    assert info.value.kind == kind
