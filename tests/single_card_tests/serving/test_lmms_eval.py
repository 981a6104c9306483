"""Requests as lmms-eval's models for OpenAI's interface make them, through the `openai` package.

Guarantees: each is taken, with its images in their places and its settings.
Source of the shapes, by lmms-eval's commits: `models/simple/openai_compatible.py` 0e58637d (0.3),
`models/simple/openai.py` 098cf8cc and `models/chat/openai.py` 05ed5a74 (0.7), with
`protocol.py` 038b4a7e for messages, and `models/chat/async_openai.py` 5bc4a768.
"""

import openai
import pytest

from tests.support.openai_server import png, scripted, serving, template_processor, uri

IMAGE = {"type": "image_url", "image_url": {"url": uri(png())}}
TEXT = {"type": "text", "text": "What is it?\nAnswer with a letter."}
GREEDY = {"max_tokens": 16, "temperature": 0}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {}}}


def user(*parts):
    return {"role": "user", "content": [*parts]}


def frames(*seconds):
    times = ({"type": "text", "text": f"<{each:.1f} seconds>"} for each in seconds)
    return [part for time in times for part in (time, IMAGE)]


@pytest.mark.parametrize(
    ("messages", "settings", "num_images", "wanted"),
    [
        # simple/openai_compatible and simple/openai: the text, then all images or frames.
        ([user(TEXT, IMAGE)], GREEDY, 1, (0.0, 16)),
        ([user(TEXT, *[IMAGE] * 10)], {"max_tokens": 32, "temperature": 0.7}, 10, (0.7, 32)),
        ([user(TEXT)], {**GREEDY, "top_p": None}, 0, (0.0, 16)),
        # To a model with "o1" or "o3" in its name.
        (
            [user(TEXT, IMAGE)],
            {
                "reasoning_effort": "medium",
                "response_format": {"type": "text"},
                "max_completion_tokens": 16,
            },
            1,
            (1.0, 16),
        ),
        # chat/openai: messages in the order of the task, and frames of a video with their times.
        (
            [
                {"role": "system", "content": [TEXT]},
                user(IMAGE, TEXT, IMAGE),
                {"role": "assistant", "content": [TEXT]},
                user(TEXT),
            ],
            GREEDY,
            2,
            (0.0, 16),
        ),
        ([user(*frames(0.5, 2.5, 4.0), TEXT)], GREEDY, 3, (0.0, 16)),
        # chat/async_openai: what a tool gave.
        (
            [
                user(IMAGE, TEXT),
                {"role": "assistant", "content": ""},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "name": "look", "content": [TEXT, IMAGE]},
            ],
            {
                **GREEDY,
                "tools": [{"type": "function", "function": TOOL}],
                "tool_choice": "auto",
            },
            2,
            (0.0, 16),
        ),
    ],
)
def test_its_requests_are_taken(asked_model, messages, settings, num_images, wanted):
    served, client = asked_model
    found = client.chat.completions.create(model="digits", messages=messages, **settings)
    assert found.choices[0].message.content == "A"
    assert found.usage.completion_tokens == 2
    request = served.engine.handles[-1].request
    assert len(request.visual.get("image_grid_thw", ())) == num_images
    assert (request.sampling.temperature, request.sampling.max_tokens) == wanted


@pytest.fixture(scope="module")
def asked_model(tmp_path_factory):
    served = scripted(template_processor(tmp_path_factory.mktemp("processor")), "A")
    with serving(served) as address:
        yield served, openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
