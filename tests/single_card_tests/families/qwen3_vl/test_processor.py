"""Processor: conversations, images and videos to model inputs, and HF's files."""

import json
from dataclasses import replace

import numpy as np
import pytest

from paddle_vl.data.formats.reader import parse_record
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.video_reader import FrameFiles, VideoFrames
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.templates.template_files import read_folder_templates
from tests.single_card_tests.data.video_files import moving_frames
from tests.single_card_tests.families.qwen3_vl.chat_builders import (
    assistant,
    question,
    random_image,
    tiny_processor,
    user,
)

PROCESSOR = tiny_processor()
SMALL, WIDE = random_image(8, 8), random_image(8, 16)


def test_prompts_are_padded_on_the_left_and_end_with_the_opened_answer():
    batch = PROCESSOR(
        messages=[[user("<image>?")], [user("A long question? A cat on a mat.")]],
        images=[[SMALL], []],
    )
    ids, keep = batch["input_ids"], batch["attention_mask"].astype(bool)
    assert keep.sum(axis=1).max() == ids.shape[1]
    assert (np.diff(keep.astype(int), axis=1) >= 0).all()
    assert (ids[~keep] == PROCESSOR.pad_token_id).all()
    texts = [PROCESSOR.decode(row[own], False) for row, own in zip(ids, keep, strict=True)]
    assert texts[0].startswith("<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>?")
    assert all(text.endswith("<|im_end|>\n<|im_start|>assistant\n") for text in texts)


@pytest.mark.parametrize("content", ["<image>a<video>", "<video>a<image>", "<video><image><video>"])
def test_images_and_videos_of_a_sample_come_each_in_reading_order(content):
    clips = [VideoFrames(moving_frames(n, 8, 16), 2.0) for n in (4, 3)][: content.count("<video>")]
    record = question(content, images=[SMALL], videos=clips)
    sample = PROCESSOR.encode_sample(parse_record(record))
    arrays, _ = PROCESSOR.video_processor(clips)
    for key, value in (PROCESSOR.image_processor([SMALL]) | arrays).items():
        np.testing.assert_array_equal(sample[key], value)
    ids = sample["input_ids"]
    assert np.count_nonzero(ids == PROCESSOR.video_token_id) == 4 * len(clips)
    assert sample["video_grid_thw"].tolist() == [[2, 2, 4]] * len(clips)


def test_mixed_batch_equals_its_samples_one_by_one():
    clip = VideoFrames(moving_frames(4, 8, 16), 2.0)
    messages = [[user("<image>a<video>")], [user("hello")], [user("<video><image>")]]
    media = {"images": [[SMALL], [], [WIDE]], "videos": [[clip], [], [clip]]}
    batch = PROCESSOR(messages, **media)
    for row, (own, *parts) in enumerate(zip(messages, *media.values(), strict=True)):
        single = PROCESSOR(own, *parts)
        np.testing.assert_array_equal(
            batch["input_ids"][row][batch["attention_mask"][row] == 1], single["input_ids"][0]
        )
    assert batch["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]]
    assert batch["video_grid_thw"].tolist() == [[2, 2, 4], [2, 2, 4]]
    pixels = PROCESSOR.image_processor([SMALL, WIDE])["pixel_values"]
    np.testing.assert_array_equal(batch["pixel_values"], pixels)


def test_images_that_match_no_conversation_are_refused():
    with pytest.raises(ValueError, match="2 conversations but 1 lists of images"):
        PROCESSOR([[user("a")], [user("b")]], images=[[]])
    with pytest.raises(ValueError, match="2 conversations but 3 lists of videos"):
        PROCESSOR([[user("a")], [user("b")]], videos=[[], [], []])


CHAT = [user("<image>?"), assistant("a"), user("b"), assistant("c d")]
ANSWER = "<|im_start|>assistant\nc d"


@pytest.mark.parametrize(
    ("arguments", "ending"),
    [
        ({}, ANSWER),
        ({"continue_final_message": True}, ANSWER),
        ({"add_generation_prompt": False}, ANSWER + "<|im_end|>\n"),
        ({"continue_final_message": False}, ANSWER + "<|im_end|>\n"),
        ({"add_generation_prompt": True}, ANSWER + "<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_a_chat_that_ends_with_an_answer_is_continued_unless_told_otherwise(arguments, ending):
    batch = PROCESSOR([CHAT, CHAT[:1]], images=[[SMALL], [SMALL]], **arguments)
    texts = PROCESSOR.batch_decode(batch["input_ids"], False)
    assert texts[0].endswith(ending)
    opened = "?<|im_end|>\n<|im_start|>assistant\n"
    if not arguments:
        assert texts[1].endswith(opened)
    elif arguments.get("continue_final_message"):
        assert texts[1].endswith("<|vision_end|>?")


def test_labels_are_those_of_training():
    chats, images = [CHAT, [user("b?"), assistant("c")]], [[SMALL], []]
    batch = PROCESSOR(chats, images=images, labels=True)
    for row, (messages, own) in enumerate(zip(chats, images, strict=True)):
        sample = PROCESSOR.encode_sample(parse_record({"messages": messages, "images": own}))
        real = batch["attention_mask"][row] == 1
        for name in ("input_ids", "labels"):
            np.testing.assert_array_equal(batch[name][row][real], sample[name])
        assert (batch["labels"][row][~real] == -100).all()
    with pytest.raises(BadSampleError, match="no assistant turn"):
        PROCESSOR(CHAT[:1], images=[SMALL], labels=True)
    with pytest.raises(ValueError, match="labels are those of whole conversations"):
        PROCESSOR(CHAT, images=[SMALL], labels=True, add_generation_prompt=True)


@pytest.mark.parametrize(
    "ends", [{}, {"add_generation_prompt": True}, {"continue_final_message": True}]
)
def test_the_chat_template_gives_text_ids_or_a_batch(ends):
    text = PROCESSOR.apply_chat_template(CHAT, [SMALL], **ends)
    # One placeholder, as the small image has one visual token.
    ids = PROCESSOR.apply_chat_template(CHAT, [SMALL], tokenize=True, **ends)
    assert PROCESSOR.decode(ids[0], skip_special_tokens=False) == text
    assert PROCESSOR.apply_chat_template([CHAT], [[SMALL]], **ends) == [text]
    batch = PROCESSOR.apply_chat_template(
        CHAT, [SMALL], tokenize=True, return_dict=True, return_tensors="np", **ends
    )
    assert batch["input_ids"].tolist() == ids.tolist()
    assert batch["pixel_values"].shape == (4, 96)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": "a"}, "the processor has no text.*give messages"),
        ({"return_tensors": "pt"}, "no return_tensors.*NumPy's, which the model takes"),
        ({"max_length": 8}, "no max_length.*nothing is cut"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "give one of them"),
    ],
)
def test_arguments_without_a_meaning_here_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PROCESSOR(CHAT, images=[SMALL], **arguments)
    neutral = {"return_tensors": "np", "padding": True, "truncation": False}
    assert set(PROCESSOR(CHAT[2:], **neutral)) == {"input_ids", "attention_mask"}


def test_settings_of_videos_replace_the_files_and_are_saved(tmp_path):
    PROCESSOR.save_pretrained(tmp_path)
    found = VLProcessor.from_pretrained(
        tmp_path, video_fps=1.0, video_min_frames=2, video_max_frames=6, video_min_pixels=256,
        video_max_pixels=512, video_markers="both",
    )  # fmt: skip
    wanted = replace(
        PROCESSOR.video_processor, fps=1.0, min_frames=2, max_frames=6, min_pixels=256,
        max_pixels=512, video_markers="both",
    )  # fmt: skip
    assert found.video_processor == wanted
    found.save_pretrained(tmp_path / "copy")
    assert VLProcessor.from_pretrained(tmp_path / "copy").video_processor == wanted


INNER, BOTH = ("user\n<0", "|>?"), ("user\n<|vision_start|><0", "|><|vision_end|>?")


@pytest.mark.parametrize(("stored", "model_type", "given", "around"), [
    (None, None, None, INNER),
    (None, "qwen3_vl_moe", None, INNER),
    (None, "qwen3_vl", "both", BOTH),
    (None, "qwen3_5", None, BOTH),
    (None, "qwen3_5_moe", None, BOTH),
    ("inner", "qwen3_5", None, INNER),
    ("both", "qwen3_vl", None, BOTH),
    ("both", "qwen3_vl", "inner", INNER),
])  # fmt: skip
def test_vision_tokens_around_a_video_are_those_of_the_setting_the_files_or_the_family(
    tmp_path, stored, model_type, given, around
):
    """By default those of transformers 5.24 for Qwen3.5, of 4.57 for Qwen3-VL."""
    videos = PROCESSOR.video_processor.replaced(video_markers=stored)
    VLProcessor(PROCESSOR.tokenizer, PROCESSOR.image_processor, videos).save_pretrained(tmp_path)
    processor = VLProcessor.from_pretrained(tmp_path, video_markers=given, model_type=model_type)
    processor.save_pretrained(tmp_path / "copy")
    for each in (processor, VLProcessor.from_pretrained(tmp_path / "copy")):
        inputs = each([user("<video>?")], videos=[VideoFrames(moving_frames(4, 8, 16), 2.0)])
        text = each.decode(inputs["input_ids"][0], False)
        assert around[0] in text
        assert text.partition("<|im_end|>")[0].endswith(around[1])
        assert around == BOTH or "<|vision_end|><|vision_end|>" not in text
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    from_folder = VLProcessor.from_pretrained(tmp_path, video_markers=given)
    assert from_folder.fingerprint() == processor.fingerprint()


def test_a_list_of_pictures_is_a_video(tmp_path):
    """Files, PIL images and arrays; see the video processor's tests for their times."""
    WIDE.save(tmp_path / "a.png")
    clips = [[str(tmp_path / "a.png")] * 3, [WIDE] * 3, [np.asarray(WIDE)] * 3]
    batches = [PROCESSOR([user("<video>?")], videos=[clip]) for clip in clips]
    assert batches[0]["video_grid_thw"].tolist() == [[2, 2, 4]]
    for batch in batches[1:]:
        for key, value in batches[0].items():
            np.testing.assert_array_equal(batch[key], value)
    own = PROCESSOR([user("<video>?")], videos=[FrameFiles((WIDE, WIDE), fps=1)])
    assert "<0.5 seconds>" in PROCESSOR.decode(own["input_ids"][0])


def test_files_of_the_checkpoint_are_carried_along(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    PROCESSOR.save_pretrained(source)
    (source / "chat_template.jinja").unlink()
    own = {"chat_template.json": '{"chat_template": "own"}', "tokenizer_config.json": "{}"}
    for name, text in own.items():
        (source / name).write_text(text)
    VLProcessor.from_pretrained(source).save_pretrained(target)
    assert {name: (target / name).read_text() for name in own} == own
    assert not (target / "chat_template.jinja").exists()


def nested_of(processor: VLProcessor, **more) -> str:
    """As transformers 5.24 writes processor_config.json."""
    return json.dumps(
        {
            "image_processor": processor.image_processor.to_dict(),
            "video_processor": processor.video_processor.to_dict(),
            **more,
        }
    )


def test_nested_settings_are_taken_and_written_where_transformers_takes_them(tmp_path):
    """AutoProcessor of transformers 5.24: sections of processor_config.json win one by one, then
    the processor's own file; videos without either have the settings in the file of images."""
    videos = PROCESSOR.video_processor
    other = VLProcessor(
        PROCESSOR.tokenizer,
        PROCESSOR.image_processor.replaced(max_pixels=1024),
        videos.replaced(fps=1.0, max_pixels=2048),
    )
    PROCESSOR.save_pretrained(tmp_path)
    nested = tmp_path / "processor_config.json"
    whole = json.loads(nested_of(other))
    for sections in (["image_processor"], ["video_processor"], list(whole)):
        nested.write_text(json.dumps({name: whole[name] for name in sections}))
        found = VLProcessor.from_pretrained(tmp_path)
        for name in whole:
            assert getattr(found, name) == getattr(other if name in sections else PROCESSOR, name)
    nested.write_text(json.dumps(whole | {"image_processor": None}))
    found = VLProcessor.from_pretrained(tmp_path, max_pixels=512, video_max_pixels=512)
    assert found.image_processor == PROCESSOR.image_processor.replaced(max_pixels=512)
    # One processor alone, then all, into the folder that has the old file.
    found.image_processor.save_pretrained(tmp_path)
    again = VLProcessor.from_pretrained(tmp_path)
    assert again.image_processor == found.image_processor
    assert again.video_processor == other.video_processor
    found.save_pretrained(tmp_path)
    assert not nested.exists()
    assert VLProcessor.from_pretrained(tmp_path).video_processor == found.video_processor
    (tmp_path / "video_preprocessor_config.json").unlink()
    limits = {"min_pixels": found.image_processor.min_pixels, "max_pixels": 512}
    assert VLProcessor.from_pretrained(tmp_path).video_processor == videos.replaced(**limits)
    nested.write_text("{")
    with pytest.raises(RuntimeError, match=r"processor_config\.json"):
        VLProcessor.from_pretrained(tmp_path)


def test_templates_of_an_earlier_processor_are_removed(tmp_path):
    """transformers 5.24 would read each before or beside chat_template.jinja."""
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("chat_template.json", "additional_chat_templates/tool_use.jinja"):
        (tmp_path / name).write_text('{"chat_template": "old"}')
    named = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    (tmp_path / "source").mkdir()
    PROCESSOR.save_pretrained(tmp_path / "source")
    nested = tmp_path / "source" / "processor_config.json"
    nested.write_text(nested_of(PROCESSOR, chat_template=named))
    (tmp_path / "source" / "chat_template.json").write_text('{"chat_template": "loses"}')
    PROCESSOR.save_pretrained(tmp_path)
    assert read_folder_templates(tmp_path).file.name == "chat_template.jinja"
    VLProcessor.from_pretrained(tmp_path / "source").save_pretrained(tmp_path)
    assert read_folder_templates(tmp_path) == (
        named["default"], tmp_path / "chat_template.jinja", named["tool_use"]
    )  # fmt: skip


def test_a_template_equal_to_the_built_in_one_is_known(tmp_path):
    PROCESSOR.save_pretrained(tmp_path)
    assert VLProcessor.from_pretrained(tmp_path).fingerprint() == PROCESSOR.fingerprint()
    # As Git or an editor may write it.
    file = tmp_path / "chat_template.jinja"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    assert VLProcessor.from_pretrained(tmp_path).fingerprint() == PROCESSOR.fingerprint()
