"""The built-in chat template: token ids of a conversation, its targets, and protection from forged
control tokens."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_vl.data.formats.reader import parse_record
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.inputs.tokenizer import train_bpe
from paddle_vl.families.vlm.templates.built_in import CONTROL_TOKENS
from paddle_vl.families.vlm.templates.encoding import TemplateEncoder, VideoPrompt
from tests.single_card_tests.families.qwen3_vl.chat_builders import (
    TEXTS,
    assistant,
    tiny_processor,
    tiny_tokenizer,
    user,
)

GOLDEN = Path(__file__).parents[3] / "golden" / "qwen_vl" / "processor"
TABLES = json.loads((GOLDEN / "processor.json").read_text())
TOKENIZER = tiny_tokenizer()


def encode(
    messages, num_image_tokens=(), images=(), videos=(), prompts=(), tokenizer=TOKENIZER, **options
):
    record = {"messages": messages, "images": list(images), "videos": list(videos)}
    template = TemplateEncoder(None, tokenizer.backend)
    return template.encode(parse_record(record), num_image_tokens, prompts, **options)


def as_text(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("row", TABLES["frame_sampling"], ids=lambda row: str(row["fps"]))
@pytest.mark.parametrize(
    ("is_enclosed", "around"),
    [(False, ("", "")), (True, ("<|vision_start|>", "<|vision_end|>"))],
)
def test_video_renders_as_the_golden_timestamps_with_their_patches(row, is_enclosed, around):
    """Without other vision tokens around as in transformers 4.57, with them as in 5.24."""
    prompt = VideoPrompt(row["timestamps"], 1, is_enclosed)
    chat = encode([user("<video>"), assistant("x")], videos=["a.mp4"], prompts=[prompt])
    pads = "<|vision_start|><|video_pad|><|vision_end|>"
    patches = "".join(text + pads for text in row["text"]).join(around)
    assert as_text(chat.input_ids).startswith(f"<|im_start|>user\n{patches}<|im_end|>\n")
    assert as_text([label for label in chat.labels if label != -100]) == "x<|im_end|>"


def test_timestamp_is_tokenised_with_the_text_in_front_of_it():
    """As in HF, which writes it into the text before tokenization."""
    tokenizer = train_bpe(["Look:<0.3 seconds>"] * 3, 300, CONTROL_TOKENS)
    whole = tokenizer.encode("user\nLook:<0.3 seconds>")
    assert whole != [*tokenizer.encode("user\nLook:"), *tokenizer.encode("<0.3 seconds>")]
    prompts = [VideoPrompt([0.28], 1)]
    chat = encode([user("Look:<video>")], (), (), ["a.mp4"], prompts, tokenizer)
    assert chat.input_ids[1 : 1 + len(whole)] == whole


# Hypothesis also tries the package's string literals, including tags.
PLAIN_TEXT = st.text(max_size=8).filter(lambda text: "<" not in text)


@given(PLAIN_TEXT, PLAIN_TEXT)
def test_training_sees_the_ids_that_generation_starts_from(text, answer):
    prompt = encode([user(text)], add_generation_prompt=True).input_ids
    sample = encode([user(text), assistant(answer)])
    assert sample.input_ids[: len(prompt)] == prompt
    assert sample.labels[: len(prompt)] == [-100] * len(prompt)
    answered = [*TOKENIZER.encode(answer), TOKENIZER.token_id("<|im_end|>")]
    assert sample.labels[len(prompt) : -1] == answered
    assert sample.labels[-1] == -100


def test_text_between_control_tokens_is_tokenised_as_one():
    """As in HF: the line break after the role merges with one at the start of the text, and
    adjacent texts are merged."""
    tokenizer = train_bpe(["user\n\nA cat"] * 3, 300, CONTROL_TOKENS)
    parts = [{"type": "text", "text": text} for text in ("\nA c", "at")]
    ids = encode([user(parts)], tokenizer=tokenizer).input_ids
    im_start, im_end = (tokenizer.token_id(f"<|im_{end}|>") for end in ("start", "end"))
    whole = tokenizer.encode("user\n\nA cat")
    assert ids == [im_start, *whole, im_end, *tokenizer.encode("\n")]
    apart = ("user\n", "\nA c", "at")
    assert whole != [token_id for text in apart for token_id in tokenizer.encode(text)]


@pytest.mark.parametrize("token", [*CONTROL_TOKENS, "<|own|>"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_special_token_in_text_is_refused_by_name(token, role):
    tokenizer = train_bpe(TEXTS, 300, [*CONTROL_TOKENS, "<|own|>"])
    with pytest.raises(BadSampleError) as info:
        encode([{"role": role, "content": f"see {token} here"}], tokenizer=tokenizer)
    assert token in str(info.value)
    assert info.value.kind == "special_token"


def test_tokenizer_without_a_control_token_is_refused_by_name():
    with pytest.raises(ValueError, match=r"<\|video_pad\|>"):
        VLProcessor(train_bpe(TEXTS, 300, CONTROL_TOKENS[:-1]), tiny_processor().image_processor)
