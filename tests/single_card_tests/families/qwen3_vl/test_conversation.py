"""Conversations: both formats of messages give the same turns, and every error has its message.

Guarantees: tags and image entries keep their places; paths start at the file's folder; other
entries of the record are kept; each kind of bad record is refused with its reason. The spellings of
messages are in tests/single_card_tests/data/formats.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from paddle_vl.data.formats.reader import parse_record
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import load_rgb
from paddle_vl.data.video_reader import open_video
from tests.single_card_tests.families.qwen3_vl.chat_builders import (
    question,
    random_image,
    user,
)

HERE = Path("/data")


def parts_of(conversation):
    """Kind and value of the parts of the first message."""
    parts = conversation.messages[0]["content"]
    return [(part["type"], part[part["type"]]) for part in parts]


def test_tags_take_the_images_in_order_and_keep_the_text_between():
    record = question("<image>\nBefore<image> after", images=["a.png", "sub/b.png"])
    assert parts_of(parse_record(record, HERE)) == [
        ("image", "/data/a.png"), ("text", "\nBefore"), ("image", "/data/sub/b.png"),
        ("text", " after"),
    ]  # fmt: skip


def test_videos_are_read_in_both_spellings_among_images_in_any_order():
    parts = [
        {"type": "video", "video": "a.mp4"},
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "One"},
        {"type": "video"},
    ]
    listed = parse_record(question(parts, videos=["file:///abs/b.mp4"]), HERE)
    media = {"images": ["a.png"], "videos": ["a.mp4", "/abs/b.mp4"]}
    tagged = parse_record(question("<video><image>One<video>", **media), HERE)
    assert listed == tagged
    assert listed.videos == [str(HERE / "a.mp4"), "/abs/b.mp4"]
    assert listed.media == ["video", "image", "video"]


def test_absolute_paths_file_urls_and_images_in_memory_are_taken_as_they_are():
    image, array = random_image(8, 8), np.zeros((8, 8, 3), np.uint8)
    record = question("<image><image><image>", images=["/abs/a.png", "file:///abs/b.png", image])
    assert parse_record(record, HERE).images == ["/abs/a.png", "/abs/b.png", image]
    part = {"type": "image", "image": array}
    assert parse_record({"messages": [user([part])]}).images[0] is array


def test_a_video_of_frames_has_them_in_order_and_no_rate_of_its_own(tmp_path):
    for name in ("1.png", "2.png", "3.png"):
        random_image(8, 8).save(tmp_path / name)
    record = question("<video>", videos=[["1.png", "2.png", "3.png"]])
    (source,) = parse_record(record, tmp_path).videos
    video = open_video(source)
    assert (video.num_frames, video.fps) == (3, None)
    (frame,) = video.frames([2])
    np.testing.assert_array_equal(frame, load_rgb(tmp_path / "3.png"))


def test_other_entries_of_the_record_are_kept():
    assert parse_record(question(task="single", images=[])).extras == {"task": "single"}


BAD_RECORDS = {
    "missing_key": [
        ({"images": []}, "no 'messages'; its keys are .*'images'"),
        ({"messages": []}, "at least one message"),
        ({"messages": "hello"}, "must be a list"),
        ({"messages": ["hello"]}, "message 1 is a str"),
        ({"messages": [user("a"), {"content": "b"}]}, "message 2 has no 'role'"),
        ({"messages": [user(3)]}, "content of type int"),
        (question("<image>", images=3), "a list of images is needed"),
        (question("<video>", videos=[{"bytes": None}]), "video source .* is not a path"),
    ],
    "unknown_role": [
        ({"messages": [{"role": "bot", "content": "a"}]}, "role 'bot'; use one of system"),
    ],
    "tag_count": [
        (question("<video><video>", videos=["a.mp4"]), "2 video place.* but 1 entries"),
        (question("a", "<video>", videos=["a.mp4"]), "2 has role 'assistant' .*<video> tag"),
    ],
    "remote": [
        (question("<video>", videos=["https://x.org/a.mp4"]), "video .* is not a file"),
        (question("<image>", images=["https://x.org/a.png"]), "is not a file"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "record", "message"),
    [(kind, *case) for kind, cases in BAD_RECORDS.items() for case in cases],
)
def test_bad_record_is_refused_with_its_reason(kind, record, message):
    with pytest.raises(BadSampleError, match=message) as info:
        parse_record(json.loads(json.dumps(record)), HERE)
    assert info.value.kind == kind
