"""Dataset: JSONL files of conversations, checked when opened, decoded on access.

Guarantees: samples keep file order across files; every bad sample is reported with file, line and
reason, at opening or at decoding; `skip` leaves it out and counts it; a sample over the limit is
cut only where that is harmless.
"""

import json
import re

import numpy as np
import pytest

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.inputs.dataset import MessagesDataset
from paddle_vl.families.vlm.inputs.open_data import open_conversations
from paddle_vl.families.vlm.settings import VLDataConfig
from tests.single_card_tests.data.video_files import write_video
from tests.single_card_tests.families.qwen3_vl.chat_builders import (
    question,
    random_image,
    tiny_processor,
    user,
    write_jsonl,
)

PROCESSOR = tiny_processor()


def decoded(sample):
    return PROCESSOR.decode(sample["input_ids"], skip_special_tokens=False)


def test_samples_keep_file_order_and_paths_start_at_their_file(tmp_path):
    (tmp_path / "sub").mkdir()
    random_image(8, 16).save(tmp_path / "sub" / "a.png")
    first = write_jsonl(tmp_path / "1.jsonl", [question(answer="\u00e9ins"), "", question()])
    second = write_jsonl(tmp_path / "sub" / "2.jsonl", [question("<image>", images=["a.png"])])
    dataset = MessagesDataset([first, second], PROCESSOR)
    assert len(dataset) == 3
    assert [dataset.place(i) for i in range(3)] == [f"{first}:1", f"{first}:3", f"{second}:1"]
    assert "\u00e9ins" in decoded(dataset[0])
    assert "A cat." in decoded(dataset[1])
    assert dataset[2]["image_grid_thw"].tolist() == [[1, 2, 4]]
    dataset.limit = 2
    assert len(dataset) == 2


def test_conversation_keeps_the_other_entries_of_its_record(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [question(task="single")])
    assert MessagesDataset([file], PROCESSOR).conversation(0).extras == {"task": "single"}


def test_a_file_is_searched_for_the_place_of_bad_samples_alone(tmp_path, monkeypatch):
    rows = [question(), question("<image>", images=["gone.png"])]
    (tmp_path / "a.json").write_text(json.dumps(rows), encoding="utf-8")
    data = VLDataConfig(processor="unused", on_bad_sample="skip")
    dataset = open_conversations([str(tmp_path / "a.json")], data, PROCESSOR, 0)
    searched = []
    monkeypatch.setattr(type(dataset), "row_place", lambda self, row: searched.append(row) or "x:2")
    assert "A cat." in decoded(dataset[0])
    assert searched == []
    with pytest.raises(BadSampleError, match=r"^x:2: .*gone\.png"):
        dataset[1]


# Of the reader of lines, of rows, of messages, and of their files.
BAD_LINES = {
    "broken_json": ('{"messages": ', "broken JSON"),
    "missing_key": ({"images": []}, "no 'messages'"),
    "tag_count": (question("<image><image>", images=["a.png"]), "2 image place.* but 1 entries"),
    "missing_image": (question("<image>", images=["gone.png"]), r"gone\.png does not exist"),
    "no_assistant": ({"messages": [user("a")]}, "no assistant turn"),
    "missing_video": (question("<video>", videos=["v.mp4"]), r"v\.mp4 does not exist"),
}


@pytest.fixture
def folder(tmp_path):
    random_image(8, 8).save(tmp_path / "a.png")
    return tmp_path


@pytest.mark.parametrize("kind", BAD_LINES)
def test_bad_line_fails_the_opening_with_file_line_and_reason(folder, kind):
    row, reason = BAD_LINES[kind]
    file = write_jsonl(folder / "data.jsonl", [question(), row])
    with pytest.raises(BadSampleError, match=rf"^{re.escape(str(file))}:2: .*{reason}") as info:
        MessagesDataset([file], PROCESSOR)
    assert info.value.kind == kind


def test_failure_tells_how_many_more_lines_are_bad(folder):
    file = write_jsonl(folder / "data.jsonl", [question(), "{", question(), "{", "{"])
    with pytest.raises(
        BadSampleError, match=rf"2 more bad .* the next at {re.escape(str(file))}:4"
    ):
        MessagesDataset([file], PROCESSOR)


def test_skip_leaves_out_bad_lines_and_counts_them_by_kind(folder):
    rows = [question(answer="one"), *(row for row, _ in BAD_LINES.values()), question(answer="two")]
    file = write_jsonl(folder / "data.jsonl", [*rows, "{"])
    dataset = MessagesDataset([file], PROCESSOR, on_bad_sample="skip")
    assert len(dataset) == 2
    assert "two" in decoded(dataset[1])
    assert dataset.skipped == {**dict.fromkeys(BAD_LINES, 1), "broken_json": 2}


def test_all_lines_bad_fails_even_when_skipping(folder):
    file = write_jsonl(folder / "data.jsonl", ["{", "["])
    with pytest.raises(ValueError, match=r"all 2 samples are bad.*data\.jsonl:1"):
        MessagesDataset([file], PROCESSOR, on_bad_sample="skip")


def test_no_file_and_no_lines_are_refused(tmp_path):
    file = tmp_path / "data.jsonl"
    for text in ("", "\n \n"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"data\.jsonl is empty"):
            MessagesDataset([file], PROCESSOR, on_bad_sample="skip")
    with pytest.raises(RuntimeError, match=r"gone\.jsonl does not exist"):
        MessagesDataset([tmp_path / "gone.jsonl"], PROCESSOR)
    with pytest.raises(ValueError, match="no data file"):
        MessagesDataset([], PROCESSOR)
    with pytest.raises(ValueError, match="'ignore'; use 'fail' or 'skip'"):
        MessagesDataset([file], PROCESSOR, on_bad_sample="ignore")


DECODED = {
    "unreadable_image": (question("<image>", images=["text"]), r"text\)?: .* decoded"),
    "special_token": (question("<|im_end|>"), r"<\|im_end\|>"),
    "unreadable_video": (question("<video>", videos=["text"]), r"video 1 \(.*text\): the file"),
}


@pytest.mark.parametrize("kind", DECODED)
def test_fault_found_when_decoding_names_file_line_and_reason(folder, kind):
    (folder / "text").write_text("no image and no video")
    row, reason = DECODED[kind]
    file = write_jsonl(folder / "data.jsonl", [question(), row])
    dataset = MessagesDataset([file], PROCESSOR)
    with pytest.raises(BadSampleError, match=rf"^{re.escape(str(file))}:2: .*{reason}") as info:
        dataset[1]
    assert info.value.kind == kind


def two_image_sample(folder, **options):
    random_image(8, 16).save(folder / "wide.png")
    messages = [
        *question("<image>?", "one", images=["a.png"])["messages"],
        *question("<image>?", "two")["messages"],
    ]
    row = {"messages": messages, "images": ["a.png", "wide.png"]}
    return MessagesDataset([write_jsonl(folder / "data.jsonl", [row])], PROCESSOR, **options)


def test_sample_within_the_limit_is_left_alone(folder):
    whole = two_image_sample(folder)[0]
    limited = two_image_sample(folder, max_length=len(whole["input_ids"]))[0]
    for key, value in whole.items():
        np.testing.assert_array_equal(limited[key], value)


def test_every_limit_either_cuts_without_harm_or_names_it(folder):
    """Every length is compared with a plain statement of the rules."""
    whole = two_image_sample(folder)[0]
    is_image = whole["input_ids"] == PROCESSOR.image_token_id
    outcomes = set()
    for limit in range(2, len(whole["input_ids"])):
        dataset = two_image_sample(folder, max_length=limit)
        has_target = (whole["labels"][1:limit] != -100).any()
        cuts_image = is_image[limit - 1] and is_image[limit]
        if has_target and not cuts_image:
            sample = dataset[0]
            np.testing.assert_array_equal(sample["input_ids"], whole["input_ids"][:limit])
            np.testing.assert_array_equal(sample["labels"], whole["labels"][:limit])
            grids = [[[1, 2, 2]], [[1, 2, 2], [1, 2, 4]]][int(is_image[:limit].sum() == 3)]
            assert sample["image_grid_thw"].tolist() == grids
            count = np.prod(grids, axis=1).sum()
            np.testing.assert_array_equal(sample["pixel_values"], whole["pixel_values"][:count])
            outcomes.add(len(grids))
        else:
            harm = "image 2 in half" if has_target else "every target token"
            lengths = (
                rf"jsonl:1: .*has {len(whole['input_ids'])} tokens.*data\.max_length is {limit}"
            )
            with pytest.raises(BadSampleError, match=f"{lengths}.*{harm}") as info:
                dataset[0]
            assert info.value.kind == "too_long"
            outcomes.add(harm)
    assert outcomes == {1, 2, "image 2 in half", "every target token"}


def test_every_limit_keeps_each_kind_whole_or_names_it(folder):
    """An image, a video of two temporal patches and words, at every length."""
    write_video(folder / "a.mp4", 4, fps=2, size=(8, 16), codec="mpeg4")
    messages = [
        *question("<image>?", "one")["messages"],
        *question("<video>?", "two")["messages"],
    ]
    row = {"messages": messages, "images": ["a.png"], "videos": ["a.mp4"]}
    file = write_jsonl(folder / "data.jsonl", [row])
    whole = MessagesDataset([file], PROCESSOR)[0]
    is_video = np.flatnonzero(whole["input_ids"] == PROCESSOR.video_token_id)
    assert len(is_video) == 4
    first_target = np.flatnonzero(whole["labels"] != -100)[0] + 1
    for limit in range(first_target, len(whole["input_ids"])):
        dataset = MessagesDataset([file], PROCESSOR, max_length=limit)
        if is_video[0] < limit <= is_video[-1]:
            with pytest.raises(BadSampleError, match=r"video 1 in half.*data\.video_max_pixels"):
                dataset[0]
        else:
            sample = dataset[0]
            assert ("pixel_values_videos" in sample) == (limit > is_video[-1])
            assert sample["image_grid_thw"].tolist() == [[1, 2, 2]]
