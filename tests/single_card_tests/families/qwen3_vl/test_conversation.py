"""Conversations: both formats of messages give the same turns.

Guarantees: tags and image entries keep their places; paths start at the file's folder; other
entries of the record are kept; addresses are refused. The spellings of messages, and what is
refused, are in tests/single_card_tests/data/formats.
"""

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


@pytest.mark.parametrize("kind", ["image", "video"])
def test_an_address_is_refused(kind):
    record = question(f"<{kind}>", **{f"{kind}s": ["https://x.org/a"]})
    with pytest.raises(BadSampleError, match=f"{kind} .* is not a file") as info:
        parse_record(record, HERE)
    assert info.value.kind == "remote"
