"""Rows rendered by templates: HF's values, the form of contents, and texts that get lost."""

import re

import pytest

from paddle_vl.data.jsonl import BadSampleError
from tests.single_card_tests.families.vlm.templates.template_builders import (
    GOLDEN,
    PLAIN,
    THINKING,
    answer,
    renderer,
    row,
    user,
)
from tests.support.recorded_templates import check_folder

LISTS = PLAIN.replace("m.content", "(m.content | map(attribute='text') | join)")
EMPTY_FOR_LISTS = PLAIN.replace("m.content", "(m.content if m.content is string else '')")
TIDE = {"type": "function", "function": {"name": "tide", "arguments": {"harbour": 'Ki"el'}}}


def test_all_recorded_conversations_give_the_values_of_hf():
    cases = list(check_folder(GOLDEN))
    assert len(cases) > 6 * 42
    assert not [case for case in cases if case[2]]


@pytest.mark.parametrize(
    ("source", "content"), [(PLAIN, "Hi"), (EMPTY_FOR_LISTS, "Hi"), (LISTS, list)]
)
def test_contents_are_strings_unless_the_template_loses_them(source, content):
    chat = row(user("Hi"), answer("Hello."))
    found = renderer(source).render_chat(chat)
    assert "Hi<|im_end|>" in found.rendered.text
    first = found.messages[0]["content"]
    assert first == content if isinstance(content, str) else isinstance(first, content)


def test_a_template_for_lists_gets_them_though_its_own_words_contain_the_answer():
    question = user("Is it m?")
    question["content"].append({"type": "image", "image": "a.png"})
    text = renderer(LISTS).render_chat(row(question, answer("s"))).rendered.text
    assert text.endswith("assistant\ns<|im_end|>\n")


def test_sources_of_media_and_loss_do_not_reach_the_template():
    image = {"type": "image", "image": "/secret/path.png"}
    chat = row({"role": "user", "content": [image, {"type": "text", "text": "Hi"}]}, answer("Yo"))
    text = renderer("{{ messages | tojson }}").render_chat(chat).rendered.text
    assert "secret" not in text
    assert "loss" not in text
    assert '{"type": "image", "image": "image"}' in text


@pytest.mark.parametrize(
    ("source", "lost", "messages", "more"),
    [
        (PLAIN, "Because", [user("Why?"), answer("So", reasoning_content="Because")], {}),
        (PLAIN, "tide", [user("Hi"), answer("Yo")], {"tools": [TIDE]}),
        (PLAIN, 'Ki"el', [user("tide?"), answer("Yo", tool_calls=[TIDE])], {}),
        ("{{ messages[-1].content }}", "Hi", [user("Hi"), answer("Yo")], {}),
        # Its second place is only in the row.
        (PLAIN.replace("messages", "messages[1:]"), "yes", [user("yes"), answer("yes")], {}),
    ],
)
def test_a_text_that_the_template_drops_is_named(source, lost, messages, more):
    with pytest.raises(BadSampleError, match=re.escape(lost)) as error:
        renderer(source).render_chat(row(*messages, **more))
    assert error.value.kind == "lost_text"


def test_white_space_at_the_ends_may_be_trimmed_and_json_is_as_good_as_text():
    chat = row(user(" Hi \n"), answer("Say 'é' \"x\"\n"))
    assert renderer(PLAIN.replace("m.content", "m.content | trim")).render_chat(chat)
    assert renderer("{{ messages | tojson }}").render_chat(chat)
    assert renderer("{{ messages | tojson(ensure_ascii=true) }}").render_chat(chat)


def test_earlier_reasoning_that_is_dropped_has_a_remedy_of_its_own():
    earlier = answer("4", reasoning_content="Pairs.", loss=False)
    chat = row(user("2+2?"), earlier, user("3+3?"), answer("6"))
    with pytest.raises(BadSampleError, match=r"earlier_reasoning: drop .* split"):
        renderer(THINKING).render_chat(chat)
    assert "Pairs." not in renderer(THINKING).render_chat(chat, reasoning_may_go=True)[2].text
    # The last answer's is never left out.
    last = row(user("2+2?"), answer("4", reasoning_content="Pairs."))
    with pytest.raises(BadSampleError, match="Pairs"):
        renderer(PLAIN).render_chat(last, reasoning_may_go=True)


def test_rows_with_tools_take_the_template_for_tools():
    both = renderer("plain", tools_source="with tools")
    assert both.render([]).text == "plain"
    assert both.render([], tools=[TIDE]).text == "with tools"


def test_variables_of_the_row_win_over_the_run_and_the_run_over_special_tokens():
    source = "{{ eos_token }} {{ style }}"
    each = renderer(source, special_tokens={"eos_token": "<e>"}, variables={"style": "run"})
    assert each.render([]).text == "<e> run"
    assert each.render([], variables={"style": "row", "eos_token": "x"}).text == "x row"
    with pytest.raises(BadSampleError, match="messages"):
        each.render([], variables={"messages": []})


def test_an_error_of_the_template_is_a_bad_sample_with_its_words():
    with pytest.raises(BadSampleError, match="roles must take turns") as error:
        renderer("{{ raise_exception('roles must take turns') }}").render_chat(
            row(user("Hi"), answer("Yo"))
        )
    assert error.value.kind == "template_error"
    with pytest.raises(ValueError, match="compiled"):
        renderer("{% if %}")
