"""Records of conversations: places of media; further entries are used or refused by name.

`loss`, `weight`, `label` and `loss_scale` decide which answers are labels and are generated in
evaluation. The spellings of messages are in tests/single_card_tests/data/formats.
"""

from pathlib import Path

import numpy as np
import pytest

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import load_rgb
from paddle_vl.data.video_reader import open_video
from paddle_vl.families.vlm.evaluation.scorer import questions_in
from paddle_vl.families.vlm.inputs.conversation import parse_record
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset
from paddle_vl.families.vlm.inputs.tokenizer import IGNORED_LABEL
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
    ids, labels = sample["input_ids"].tolist(), [IGNORED_LABEL] * len(sample["input_ids"])
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
    assert dataset.conversation(0).extra == {}


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


REFUSED = {
    "missing_key": [
        ({"images": []}, "no 'messages'; its keys are .*'images'"),
        ({"messages": ["hello"]}, "message 1 is a str"),
        ({"messages": [user("a"), {"content": "b"}]}, "message 2 has no 'role'"),
        ({"messages": [user(3)]}, "content of type int"),
        (question("<image>", images=3), "'images' must be a list"),
        (question(system=["a"]), "'system' is of type list; a string"),
    ],
    "remote": [
        (question("<video>", videos=["https://x.org/a.mp4"]), "video .* is not a file"),
        (question("<image>", images=["https://x.org/a.png"]), "is not a file"),
    ],
    "bad_target": [
        (two_answers({"weight": 0.5}), r"message 2 has 'weight' '0\.5'; true or false"),
        ({"messages": [{**user("a"), "loss": True}, assistant("b")]}, "only an assistant's"),
    ],
    "no_target": [
        (two_answers({"loss": False}, {"weight": 0}), "none of the 2 assistant turn"),
    ],
    "empty_answer": [
        (question(answer=""), "the answer in turn 2 is empty.*'loss' to false"),
    ],
    "unknown_role": [
        ({"messages": [{"role": ["user"], "content": "b"}]}, "role .*'user'.*; use one of"),
    ],
    "preference": [
        (question(rejected_response="No."), "'rejected_response' is for preference training"),
        (two_answers(label=True), "'label' is 'True'; .* rename the key"),
    ],
    "unsupported": [
        (two_answers({"rejected_content": "a"}), "message 2 has 'rejected_content', .*preference"),
        (question(functions=[{"name": "f"}]), "'functions' is not read: .*'tools'"),
        (two_answers({"reasoning_content": "hm"}), "reasoning.*chat_template.jinja"),
        (two_answers({"train": False}), "'train', which is not read: use 'loss'"),
        (question("where?", "the <ref-object> there"), "message 2 has the tag <ref-object>"),
        (question(weight=0.5), "'weight' of a record is not read"),
        (question(query="a"), "'query' beside 'messages' is not read: write its turns"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [(kind, *case) for kind, cases in REFUSED.items() for case in cases],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, kind, row, message):
    with pytest.raises(BadSampleError, match=message) as info:
        opened(tmp_path, row)
    assert (info.value.kind, info.value.place) == (kind, f"{tmp_path / 'a.jsonl'}:1")


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
