"""Records of conversations: places of media; further entries are used or refused by name.

`loss`, `weight`, `label` and `loss_scale` decide which answers are labels and are generated in
evaluation. The spellings of messages are in tests/single_card_tests/data/formats.
"""

from pathlib import Path

import numpy as np
import pytest

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.data.formats.reader import parse_record
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import load_rgb
from paddle_vl.data.video_reader import open_video
from paddle_vl.families.vlm.evaluation.scorer import questions_in
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset
from tests.single_card_tests.families.qwen3_vl.chat_builders import (
    assistant,
    question,
    random_image,
    tiny_processor,
    user,
    write_jsonl,
)

PROCESSOR = tiny_processor()
IM_END = PROCESSOR.eos_token_ids[0]


def answer(text, **flags):
    return {**assistant(text), **flags}


def two_answers(first=None, second=None, **entries):
    """Two questions and answers with these flags."""
    answers = answer("A cat.", **(first or {})), answer("hello", **(second or {}))
    return {"messages": [user("What?"), answers[0], user("And?"), answers[1]], **entries}


def opened(tmp_path, *rows, **options):
    return MessagesDataset([write_jsonl(tmp_path / "a.jsonl", rows)], PROCESSOR, **options)


def labels_of(text):
    return [*PROCESSOR.tokenizer.encode(text), IM_END]


def expected_labels(sample, learned):
    """Labels with all tokens ignored except these runs, each of which occurs once."""
    ids, labels = sample["input_ids"].tolist(), [IGNORE_INDEX] * len(sample["input_ids"])
    for text in learned:
        run = labels_of(text)
        starts = [i for i in range(len(ids)) if ids[i : i + len(run)] == run]
        assert len(starts) == 1
        labels[starts[0] : starts[0] + len(run)] = run
    return labels


MASKS = [
    ({"loss": False}, None, {}, ["hello"]),
    ({"weight": 0}, {"weight": 1.0}, {}, ["hello"]),
    ({"label": 1}, {"label": 0}, {}, ["A cat."]),
    ({"loss": None, "weight": True}, {}, {}, ["A cat.", "hello"]),
    (None, {"loss": False}, {"label": [1, 0]}, ["A cat."]),
]


@pytest.mark.parametrize(("first", "second", "entries", "learned"), MASKS)
def test_only_turns_to_be_learned_are_labels(tmp_path, first, second, entries, learned):
    plain = opened(tmp_path, two_answers())[0]
    dataset = opened(tmp_path, two_answers(first, second, **entries))
    sample = dataset[0]
    assert sample["input_ids"].tolist() == plain["input_ids"].tolist()
    assert sample["labels"].tolist() == expected_labels(sample, learned)
    assert [each.asked.references[0] for each in questions_in(dataset, 0)] == learned
    assert dataset.conversation(0).extras == {}


def test_system_of_the_record_is_the_first_turn(tmp_path):
    told = [{"role": "system", "content": "hello"}]
    with_message = question()
    with_message["messages"] = told + with_message["messages"]
    wanted = opened(tmp_path, with_message)[0]
    for row in (question(system="hello"), {**with_message, "system": "hello"}):
        sample = opened(tmp_path, row)[0]
        assert sample["input_ids"].tolist() == wanted["input_ids"].tolist()
        assert sample["labels"].tolist() == wanted["labels"].tolist()
    for nothing in (None, ""):
        assert parse_record(question(system=nothing)) == parse_record(question())
    record = question("<image>", system="<image>like this", images=["1.png", "2.png"])
    assert parse_record(record).images == ["1.png", "2.png"]


@pytest.mark.parametrize("kind", ["image", "video"])
def test_an_address_is_refused(kind):
    record = question(f"<{kind}>", **{f"{kind}s": ["https://x.org/a"]})
    with pytest.raises(BadSampleError, match=f"{kind} .* is not a file") as info:
        parse_record(record)
    assert info.value.kind == "remote"


def test_empty_entries_say_nothing(tmp_path):
    """Tables written as JSON give every row all keys."""
    nothing = {"tool_calls": None, "reasoning_content": "", "mood": None, "loss": None}
    row = two_answers(nothing, tools=[], rejected_response=None, objects={}, image=None)
    assert opened(tmp_path, row)[0]["labels"].tolist() == (
        opened(tmp_path, two_answers())[0]["labels"].tolist()
    )


def test_an_empty_answer_that_is_not_learned_is_no_fault(tmp_path):
    row = two_answers({"content": "", "loss": False})
    sample = opened(tmp_path, row)[0]
    assert sample["labels"].tolist() == expected_labels(sample, ["hello"])


def test_absolute_paths_file_urls_and_images_in_memory_are_taken_as_they_are():
    image, array = random_image(8, 8), np.zeros((8, 8, 3), np.uint8)
    record = question("<image><image><image>", images=["/abs/a.png", "file:///abs/b.png", image])
    assert parse_record(record, Path("/data")).images == ["/abs/a.png", "/abs/b.png", image]
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
