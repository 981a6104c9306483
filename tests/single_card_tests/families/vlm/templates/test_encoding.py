"""Ids and labels by a checkpoint's template: media, what is learned, and what is refused."""

import pytest

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.templates.built_in import JINJA_TEMPLATE
from paddle_vl.families.vlm.templates.encoding import TemplateEncoder, VideoPrompt
from tests.single_card_tests.families.vlm.templates.template_builders import (
    MARKED,
    PLAIN,
    THINKING,
    TOKENIZER,
    answer,
    encoder,
    learned_text,
    row,
    user,
)

IMAGE, VIDEO = {"type": "image", "image": "a.png"}, {"type": "video", "video": "a.mp4"}
MEDIA = row(
    {"role": "user", "content": [IMAGE, VIDEO, {"type": "text", "text": "Same?"}, IMAGE]},
    answer("No.\nNever.", loss=False),
    user("Sure?"),
    answer("Yes."),
)
COUNTS, VIDEOS = (3, 1), (VideoPrompt([0.3, 1.4], 2),)
TWO_ANSWERS = row(user("a?"), answer("b"), user("c?"), answer("d"))


@pytest.mark.parametrize("ending", ["row", "add_generation_prompt", "continue_final_message"])
def test_the_template_in_jinja_gives_ids_and_labels_of_the_built_in_one(ending):
    built_in = TemplateEncoder(None, TOKENIZER)
    prompt = {} if ending == "row" else {ending: True}
    expected = built_in.encode(MEDIA, COUNTS, VIDEOS, **prompt)
    assert encoder(JINJA_TEMPLATE).encode(MEDIA, COUNTS, VIDEOS, **prompt) == expected


def test_ids_are_those_of_the_whole_text_with_all_placeholders():
    found = encoder(JINJA_TEMPLATE).encode(MEDIA, COUNTS, VIDEOS)
    start, pad, end = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
    patch = f"{start}{'<|video_pad|>' * 2}{end}"
    text = (
        f"<|im_start|>user\n{start}{pad * 3}{end}<0.3 seconds>{patch}<1.4 seconds>{patch}Same?"
        f"{start}{pad}{end}<|im_end|>\n<|im_start|>assistant\nNo.\nNever.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    )
    assert found.input_ids == TOKENIZER.encode(text, add_special_tokens=False).ids
    assert learned_text(found) == "Yes.<|im_end|>"


def test_media_that_the_template_does_not_place_are_refused():
    here = answer("Here")
    here["content"] += [IMAGE]
    drawn = row(user("Draw."), here)
    silent = JINJA_TEMPLATE.replace("part.type == 'video'", "part.type == 'film'")
    for source, each in ((silent, MEDIA), (JINJA_TEMPLATE.replace("image_pad", "x"), drawn)):
        with pytest.raises(BadSampleError, match="places"):
            encoder(source).encode(each, COUNTS, VIDEOS)


@pytest.mark.parametrize("source", [PLAIN, MARKED])
@pytest.mark.parametrize("loss", [(True, True), (False, True), (True, False)])
def test_each_answer_is_learned_if_it_says_so(source, loss):
    answers = [answer(text, on) for text, on in zip("bd", loss, strict=True)]
    found = encoder(source).encode(row(user("a?"), answers[0], user("c?"), answers[1]))
    # The mark encloses the line break; without marks the answer ends with its special token.
    end = "<|im_end|>\n" if source == MARKED else "<|im_end|>"
    expected = "".join(text + end for text, on in zip("bd", loss, strict=True) if on)
    assert learned_text(found) == expected


def test_a_row_without_a_learned_answer_is_refused():
    with pytest.raises(BadSampleError, match="learned") as error:
        encoder(PLAIN).encode(row(user("a?"), answer("b", loss=False)))
    assert error.value.kind == "no_target"


def test_marks_that_cannot_be_told_apart_are_refused():
    last_only = MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    with pytest.raises(BadSampleError, match="marks 1 texts"):
        encoder(last_only).encode(TWO_ANSWERS)
    one_more = MARKED + "{% generation %}{{ '<|endoftext|>' }}{% endgeneration %}"
    assert learned_text(encoder(one_more).encode(TWO_ANSWERS)).endswith("<|endoftext|>")
    half = row(user("a?"), answer("b", loss=False), user("c?"), answer("d"))
    with pytest.raises(BadSampleError, match="marks 3 texts"):
        encoder(one_more).encode(half)


def test_an_answer_that_later_messages_rewrite_is_refused_unless_the_row_is_split():
    with pytest.raises(BadSampleError, match=r"message 2: later messages .* split"):
        encoder(THINKING).encode(TWO_ANSWERS)
    only_last = row(user("a?"), answer("b", loss=False), user("c?"), answer("d"))
    assert learned_text(encoder(THINKING).encode(only_last)) == "d<|im_end|>"
    splitting = encoder(THINKING, "split")
    rows = splitting.split(TWO_ANSWERS)
    assert [len(each.messages) for each in rows] == [2, 4]
    learned = [learned_text(splitting.encode(each)) for each in rows]
    assert learned == ["b<|im_end|>", "d<|im_end|>"]
    assert encoder(THINKING).split(TWO_ANSWERS) == [TWO_ANSWERS]


@pytest.mark.parametrize(
    ("source", "first", "reason"),
    [
        (PLAIN.replace("<|im_end|>", "</s-"), user("a?"), "without a special token"),
        (PLAIN, None, "nothing in front"),
        (PLAIN.replace("t\\n' -}}{%- e", "t: ' -}}{%- e"), user("a?"), "prompt that asks"),
    ],
)
def test_answers_without_an_end_or_a_prompt_are_refused(source, first, reason):
    with pytest.raises(BadSampleError, match=reason):
        encoder(source).encode(row(*([first] if first else []), answer("b")))


FORGED = "x<|im_end|>y"
CALL = {"type": "function", "function": {"name": "f", "arguments": {"k": [{"deep": FORGED}]}}}


@pytest.mark.parametrize(
    "each",
    [
        row(user(FORGED), answer("b")),
        row(user("a"), answer(FORGED)),
        row(user("a"), answer("b", reasoning_content=FORGED)),
        row(user("a"), answer("b", tool_calls=[CALL])),
        row(user("a"), {"role": "tool", "content": [{"type": "text", "text": FORGED}]}),
        row(user("a"), answer("b"), tools=[{"function": {"name": "f", "description": FORGED}}]),
        row(user("a"), answer("b"), variables={"style": FORGED}),
        row(user("a <|image_pad|>"), answer("b")),
    ],
)
def test_special_tokens_in_any_text_of_the_row_are_refused(each):
    with pytest.raises(BadSampleError, match="special token") as error:
        encoder(PLAIN).encode(each)
    assert error.value.kind == "special_token"


def test_added_tokens_that_are_not_special_are_allowed():
    found = encoder(PLAIN).encode(row(user("a <think>"), answer("<tool_call>")))
    assert learned_text(found) == "<tool_call><|im_end|>"


@pytest.mark.parametrize(("source", "kept"), [(PLAIN, "b \n"), (None, "b")])
def test_a_continued_answer_ends_where_its_text_ends(source, kept):
    source = source or PLAIN.replace("m.content", "m.content | trim")
    found = encoder(source).encode(row(user("a"), answer("b \n")), continue_final_message=True)
    assert TOKENIZER.decode(found.input_ids, False).endswith("assistant\n" + kept)


def test_a_template_that_makes_far_more_text_than_a_row_has_is_refused():
    many = "{% for i in range(9000) %}{{ messages[0].content }}{% endfor %}"
    short, long = (row(user("Hi? " * times), answer("Ho.")) for times in (1, 9))
    assert encoder(many + PLAIN).encode(short).input_ids
    with pytest.raises(BadSampleError, match="characters of a row of"):
        encoder(many + PLAIN).encode(long)
