"""The server with OpenAI's interface, asked by the real `openai` package, with scripted answers.

Guarantees: streamed answers are the whole ones; reasoning, calls of tools, stops, log-probabilities
and usage are told apart as the clients expect; answers keep schemas and forced calls; who may not
ask, asks too much or asks for what is not there is told so in OpenAI's form; what nobody waits for
any more is cancelled; at the end streams end with a reason.
"""

import functools
import json
import time
from dataclasses import replace
from http.client import HTTPConnection

import httpx2
import openai
import pytest

from tests.support.openai_server import (
    WAIT_S,
    joined,
    png,
    scripted,
    serving,
    shown,
    template_processor,
    uri,
)

QUESTION = [{"role": "user", "content": "What <image> is it?"}]
DIGIT = {
    "type": "object",
    "properties": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["digit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("write", DIGIT), ("look", {"type": "object", "properties": {}}))
]


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return template_processor(tmp_path_factory.mktemp("processor"))


@pytest.fixture(scope="module")
def shared(processor):
    """A model, and the address of its server, for tests that leave it as it was."""
    served = scripted(processor, "a")
    with serving(served) as address:
        yield served, address


@functools.cache
def client(address: str, key: str = "x") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def chat(address: str, **settings):
    asked = {"model": "digits", "messages": QUESTION, **settings}
    return client(address).chat.completions.create(**asked)


CALL = '<tool_call>\n{"name": "write", "arguments": {"digit": 3}}\n</tool_call>'
XML = "<tool_call>\n<function=write>\n<parameter=digit>\n3\n</parameter>\n</function>\n</tool_call>"
WRITE = ("write", '{"digit": 3}')
THINKS = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}


@pytest.mark.parametrize(
    ("answer", "asked", "wanted"),
    [
        ("It is é 3.", {}, {"content": "It is é 3."}),
        ("It is é 3.", {"max_tokens": 2}, {"content": "It", "reason": "length"}),
        ("one, two. STOP", {"stop": ["wo", "STOP"]}, {"content": "one, t"}),
        ("one, two. STO", {"stop": "STOP"}, {"content": "one, two. STO"}),
        ("one, two.", {"stop": "a stop of 18 chars"}, {"content": "one, two."}),
        ("<think>\na b\n</think>\n\nc", {}, {"content": "c", "reasoning": "a b"}),
        ("<thin", {}, {"content": "<thin"}),
        (
            "a b\n</think>\n\nc",
            THINKS,
            {"content": "c", "reasoning": "a b"},
        ),
        (CALL, {"tools": TOOLS}, {"calls": [WRITE], "reason": "tool_calls"}),
        (XML, {"tools": TOOLS}, {"calls": [WRITE], "reason": "tool_calls"}),
        (
            f"Well.\n{CALL}\n{XML}",
            {"tools": TOOLS},
            {"content": "Well.", "calls": [WRITE] * 2, "reason": "tool_calls"},
        ),
        (
            f"{CALL}\n{XML}",
            {"tools": TOOLS, "parallel_tool_calls": False},
            {"calls": [WRITE], "reason": "tool_calls"},
        ),
        (
            f"a b\n{XML}",
            {"tools": TOOLS, "stop": "a", **THINKS},
            {"reasoning": "a b", "calls": [WRITE], "reason": "tool_calls"},
        ),
        (CALL, {}, {"content": CALL}),
        (CALL, {"tools": TOOLS, "tool_choice": "none"}, {"content": CALL}),
        (CALL[:-13], {"tools": TOOLS}, {"calls": [WRITE], "reason": "tool_calls"}),
        (CALL[:-14], {"tools": TOOLS}, {"content": CALL[:-14]}),
        ("<tool_call>3</tool_call>", {"tools": TOOLS}, {"content": "<tool_call>3</tool_call>"}),
    ],
)
def test_a_stream_says_what_a_whole_answer_says(shared, answer, asked, wanted):
    wanted = {"content": "", "reasoning": "", "calls": [], "reason": "stop", **wanted}
    served, address = shared
    served.engine.answers = [answer]
    assert shown(chat(address, **asked).choices[0]) == wanted
    assert joined(chat(address, stream=True, **asked)) == [wanted]


def test_choices_have_seeds_usage_and_log_probabilities_of_their_own(processor):
    served = scripted(processor, "a é b")
    num = len(processor.tokenizer.encode("a é b"))
    with serving(served) as address:
        asked = {"n": 2, "seed": 7, "logprobs": True, "top_logprobs": 2}
        whole = chat(address, **asked)
        assert [each.request.sampling.seed for each in served.engine.handles] == [7, 8]
        entries = whole.choices[1].logprobs.content
        assert b"".join(bytes(each.bytes) for each in entries) == "a é b".encode()
        assert [each.logprob for each in entries] == [-1.0] * num
        assert [each.logprob for each in entries[0].top_logprobs] == [-2.0, -3.0]
        # The end token counts and is not shown.
        assert whole.usage.completion_tokens == 2 * (num + 1)
        assert whole.usage.prompt_tokens == len(served.engine.handles[0].request.input_ids)
        *chunks, last = chat(address, stream=True, stream_options={"include_usage": True}, **asked)
        assert last.usage == whole.usage
        assert not last.choices
        found = [each for chunk in chunks for choice in chunk.choices if choice.index == 1
                 for each in (choice.logprobs.content if choice.logprobs else ())]  # fmt: skip
        assert found == entries


def test_token_ids_come_with_the_end_and_what_is_ruled_out_with_the_request(processor):
    served = scripted(processor, "a é b")
    ids = [*processor.tokenizer.encode("a é b"), processor.eos_token_ids[0]]
    with serving(served) as address:
        asked = {"extra_body": {"return_token_ids": True}, "logit_bias": {"7": -100}}
        whole = chat(address, logprobs=True, **asked)
        text = client(address).completions.create(model="digits", prompt="a", **asked)
        with pytest.raises(openai.BadRequestError, match="give it without 'stream'"):
            chat(address, stream=True, **asked)
    first, second = (each.request for each in served.engine.handles)
    assert [first.sampling.suppress_tokens, second.sampling.suppress_tokens] == [(7,), (7,)]
    assert whole.prompt_token_ids == first.input_ids.tolist()
    assert whole.choices[0].token_ids == text.choices[0].token_ids == ids
    assert [each.logprob for each in whole.choices[0].logprobs.content] == [-1.0] * len(ids)
    assert whole.choices[0].message.content == "a é b"


ADAPTER, WEIGHTS = "/v1/load_lora_adapter", "/update_weights_from_disk"


@pytest.mark.parametrize(
    ("folder", "path", "asked", "status", "text"),
    [
        (None, WEIGHTS, {"model_path": "a"}, 403, "start with --allowed-weights-path"),
        ("in", WEIGHTS, {"model_path": "../out"}, 403, "is not in that of --allowed-weights-path"),
        ("in", WEIGHTS, {"model_path": "a", "flush_cache": False}, 400, "flush_cache"),
        ("in", ADAPTER, {"lora_name": "digits", "lora_path": "a"}, 400, "there is digits already"),
        ("in", ADAPTER, {"lora_name": "doors", "lora_path": "a"}, 400, "there is doors already"),
        ("in", ADAPTER, {"lora_name": "new"}, 400, "lora_path: Field required"),
    ],
)
def test_weights_are_loaded_where_it_is_allowed(
    processor, tmp_path, folder, path, asked, status, text
):
    served = scripted(processor, "a")
    if folder is not None:
        served = replace(served, weights_folder=tmp_path / folder)
    with serving(served) as address, httpx2.Client(base_url=address) as plain:
        found = plain.post(path, json=asked)
    assert (found.status_code, text in found.json()["error"]["message"]) == (status, True)


def test_texts_are_continued_as_they_are(processor):
    served = scripted(processor, "1 2 3")
    with serving(served) as address:
        create = client(address).completions.create
        prompt = ["<|im_start|>user\n", "a"]
        found = create(model="digits", prompt=prompt, n=2, logprobs=1, max_tokens=3)
        assert [each.index for each in found.choices] == [0, 1, 2, 3]
        assert {each.text for each in found.choices} == {"1 2"}
        assert found.choices[3].logprobs.tokens == ["1", " ", "2"]
        assert found.choices[3].logprobs.top_logprobs[0] == {"!": -2.0}
        asked = [each.request.input_ids.tolist() for each in served.engine.handles]
        assert asked == [processor.tokenizer.encode(text) for text in prompt for _ in range(2)]
        chunks = create(model="digits", prompt=[5, 6], stream=True, max_tokens=3)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "1 2"
        assert served.engine.handles[-1].request.input_ids.tolist() == [5, 6]


def test_a_choice_that_has_stopped_leaves_the_others_alone(shared):
    served, address = shared
    served.engine.answers = ["1 STOP 2 3", "1 2 3 4 5 6 7 STOP 8"]
    found = chat(address, n=2, stop="STOP").choices
    assert [each.message.content for each in found] == ["1 ", "1 2 3 4 5 6 7 "]


THOUGHT = "1 2 3\n</think>"
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "digit", "schema": DIGIT}}


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": JSON_SCHEMA},
        {"extra_body": {"structured_outputs": {"json": DIGIT}}},
        {"extra_body": {"structured_outputs": {"regex": r'\{"digit": [0-9]\}'}}},
        {"extra_body": {"structured_outputs": {"choice": ['{"digit": 4}', '{"digit": 5}']}}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "write"}}},
        {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False},
    ],
)
def test_answers_keep_a_schema_and_calls_are_made_where_they_must(processor, shared, asked, thinks):
    served, address = shared
    served.engine.answers = ["draw"]
    served.engine.thought = processor.tokenizer.encode(THOUGHT)
    body = {**asked.get("extra_body", {}), "chat_template_kwargs": {"enable_thinking": thinks}}
    choice = chat(address, seed=1, **{**asked, "extra_body": body}).choices[0]
    found = shown(choice)
    assert found["reasoning"] == ("1 2 3" if thinks else "")
    if "tools" in asked:
        ((name, text),) = found["calls"]
        assert (name, found["reason"]) == ("write", "tool_calls")
    else:
        text = found["content"]
        assert found["reason"] == "stop"
    assert json.loads(text)["digit"] in range(10)


IMAGE = {"type": "image_url", "image_url": {"url": uri(png())}}
WORDS = {"type": "text", "text": "What is it?\nAnswer with a letter."}
GREEDY = {"max_tokens": 16, "temperature": 0}
REASONS = {"reasoning_effort": "medium", "response_format": {"type": "text"}}
FRAMES = [each for time in (0.5, 2.5, 4.0)
          for each in ({"type": "text", "text": f"<{time} seconds>"}, IMAGE)]  # fmt: skip
ASKS_TOOL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def said(role: str, *parts):
    return {"role": role, "content": [*parts]}


@pytest.mark.parametrize(
    ("messages", "settings", "num_images", "wanted"),
    [
        # simple/openai_compatible and simple/openai: the text, then all images or frames.
        ([said("user", WORDS, IMAGE)], GREEDY, 1, (0.0, 16)),
        ([said("user", WORDS, *[IMAGE] * 10)], {**GREEDY, "temperature": 0.7}, 10, (0.7, 16)),
        ([said("user", WORDS)], {**GREEDY, "top_p": None}, 0, (0.0, 16)),
        # To a model with "o1" or "o3" in its name.
        ([said("user", WORDS, IMAGE)], {**REASONS, "max_completion_tokens": 16}, 1, (1.0, 16)),
        # chat/openai: messages in the order of the task, and frames of a video with their times.
        (
            [said("system", WORDS), said("user", IMAGE, WORDS, IMAGE), said("assistant", WORDS),
             said("user", WORDS)],
            GREEDY, 2, (0.0, 16),
        ),
        ([said("user", *FRAMES, WORDS)], GREEDY, 3, (0.0, 16)),
        # chat/async_openai: what a tool gave.
        (
            [said("user", IMAGE, WORDS), {"role": "assistant", "content": ""},
             {"role": "assistant", "tool_calls": [ASKS_TOOL]},
             {"role": "tool", "name": "look", "content": [WORDS, IMAGE]}],
            {**GREEDY, "tools": TOOLS[1:], "tool_choice": "auto"}, 2, (0.0, 16),
        ),
    ],
)  # fmt: skip
def test_requests_of_lmms_eval_are_taken(shared, messages, settings, num_images, wanted):
    """Their shapes are those of its commits 0e58637d, 098cf8cc, 05ed5a74, 038b4a7e, 5bc4a768."""
    served, address = shared
    served.engine.answers = ["A"]
    found = chat(address, messages=messages, **settings)
    assert (found.choices[0].message.content, found.usage.completion_tokens) == ("A", 2)
    request = served.engine.handles[-1].request
    assert len(request.visual.get("image_grid_thw", ())) == num_images
    assert (request.sampling.temperature, request.sampling.max_tokens) == wanted


def test_earlier_calls_and_results_are_in_the_prompt(processor):
    served = scripted(processor, CALL)
    with serving(served) as address:
        first = chat(address, tools=TOOLS).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "done 9"}
        said = first.model_dump()
        # As clients join it of a stream, and OpenAI's (3.57) sends what its `parse` has given.
        said["parsed"] = said["tool_calls"][0]["function"]["parsed_arguments"] = {"digit": 3}
        said["tool_calls"].append({"index": 1, "function": {"name": "look", "arguments": ""}})
        messages = [*QUESTION, said, result]
        chat(address, messages=messages, tools=TOOLS, tool_choice="none")
        chat(address, messages=messages, tools=TOOLS)
    without, prompt = (
        processor.decode(each.request.input_ids, skip_special_tokens=False)
        for each in served.engine.handles[1:]
    )
    assert "What <image> is it?" in prompt
    assert "done 9" in prompt
    assert prompt.count('"name": "write"') == 2
    assert without.count('"name": "write"') == 1
    assert '{"name": "look", "arguments": {}}' in prompt


@pytest.mark.parametrize(
    ("asked", "status", "text"),
    [
        ({"model": "other"}, 404, "The model 'other' does not exist; there is digits, digits-2"),
        ({"temperature": 3}, 400, "temperature: Input should be less than or equal to 2"),
        ({"extra_body": {"temprature": 1}}, 400, "Unrecognized request argument supplied: tempra"),
        ({"extra_body": {"guided_json": {"a": 1}}}, 400, "no guided_json"),
        ({"logit_bias": {"1": 3}}, 400, "no logit_bias"),
        ({"logit_bias": {"999": -100}}, 400, "logit_bias: there is no token 999"),
        ({"max_tokens": 2000}, 400, "maximum context length is 1000 tokens"),
        ({"messages": []}, 400, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "you", "content": "a"}]}, 400, "message 1 has role 'you'"),
        ({"messages": [{"role": "user", "content": "<|im_end|>"}]}, 400, "special token"),
        ({"top_logprobs": 2}, 400, "top_logprobs needs 'logprobs'"),
        ({"tools": [{"type": "function", "function": {}}]}, 400, "without a 'name'"),
        ({"tool_choice": "required"}, 400, "tool_choice: none of 'tools'"),
        ({"response_format": {"type": "json_schema"}}, 400, "json_schema is missing"),
        (
            {"extra_body": {"structured_outputs": {"json": {"type": "no"}}}},
            400,
            "structured_outputs.json cannot be kept",
        ),
        (
            {"response_format": JSON_SCHEMA, "extra_body": {"structured_outputs": {"regex": "a"}}},
            400,
            "exclude each other",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_refused_in_openais_form(shared, asked, status, text, stream):
    served, address = shared
    served.engine.answers = ["a"]
    with pytest.raises(openai.APIStatusError) as caught:
        chat(address, stream=stream, **asked)
    assert caught.value.status_code == status
    assert text in caught.value.body["message"]
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    # The server lives.
    assert chat(address).choices[0].message.content == "a"


BODIES = {
    400: [
        b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000, b'{"messages": "a"}',
        b'{"messages": [3]}', b'{"messages": [{"role": "user", "content": [3]}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
    ],
    413: [b" " * 200_000],
}  # fmt: skip


def test_malformed_bodies_are_refused(processor):
    with (
        serving(scripted(processor, "a"), max_body_bytes=150_000) as address,
        httpx2.Client(base_url=address) as plain,
    ):
        for status, body in ((each, body) for each in BODIES for body in BODIES[each]):
            found = plain.post("/v1/chat/completions", content=body)
            assert found.status_code == status, body[:80]
            assert found.json()["error"]["type"] == "invalid_request_error"
        assert plain.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
        assert plain.get("/v1/completions").status_code == 405


def until(condition) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_what_nobody_waits_for_is_cancelled(processor, stream):
    served = scripted(processor, "wait")
    body = json.dumps({"messages": QUESTION, "stream": stream})
    with serving(served) as address:
        connection = HTTPConnection(address.removeprefix("http://"), timeout=WAIT_S)
        connection.request("POST", "/v1/chat/completions", body)
        until(lambda: served.engine.handles)
        assert not served.engine.handles[0].is_cancelled.is_set()
        connection.close()
        assert served.engine.handles[0].is_cancelled.wait(WAIT_S)
        until(lambda: 'outcome="dropped"} 1' in httpx2.get(f"{address}/metrics").text)
        assert "paddle_vl_open_requests 0" in httpx2.get(f"{address}/metrics").text


def test_too_much_is_told_to_come_back(processor):
    served = scripted(processor, "wait", "a")
    served.engine.most = 2
    with serving(served, max_requests=1) as address:
        waiting = chat(address, stream=True)
        for _ in range(2):
            with pytest.raises(openai.RateLimitError) as caught:
                chat(address)
            assert caught.value.response.headers["retry-after"] == "1"
        waiting.close()
        until(lambda: "paddle_vl_open_requests 0" in httpx2.get(f"{address}/metrics").text)
        # Of two answers the engine has room for one: neither runs.
        with pytest.raises(openai.RateLimitError, match="too many tokens wait") as caught:
            chat(address, n=2)
        assert caught.value.response.headers["retry-after"] == "3"
        assert all(each.is_cancelled.is_set() for each in served.engine.handles)
        assert 'outcome="rejected"} 3' in httpx2.get(f"{address}/metrics").text


def test_time_and_the_servers_end_close_streams_with_a_reason(processor, monkeypatch):
    monkeypatch.setattr("paddle_vl.serving.openai_answer._QUIET_S", 0.05)
    served = scripted(processor, "wait", "wait", OSError("/a/folder"), "wait")
    with serving(served, deadline_s=0.2) as address:
        with pytest.raises(openai.APIStatusError) as caught:
            chat(address)
        assert caught.value.status_code == 504
        with pytest.raises(openai.APIError, match="no complete answer within 0.2 s"):
            list(chat(address, stream=True))
        with pytest.raises(openai.InternalServerError, match="the server's log says") as caught:
            chat(address)
        assert "/a/folder" not in str(caught.value)
    served = scripted(processor, "wait")
    with serving(served) as address:
        asked = {"messages": QUESTION, "stream": True}
        stream = httpx2.stream("POST", f"{address}/v1/chat/completions", json=asked)
        with stream as response:
            lines = response.iter_lines()
            assert "assistant" in next(lines)
            assert [next(lines), next(lines)] == ["", ": waiting"]
            served.engine.has_closed.set()
            *_, error, _, done, _ = lines
    assert "the server is stopping" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"


def test_who_may_not_ask_is_refused(processor):
    with serving(scripted(processor, "a"), token="right") as address:
        assert client(address, "right").models.list().data[2].parent == "digits"
        with pytest.raises(openai.AuthenticationError):
            client(address, "wrong").models.list()
        assert httpx2.get(f"{address}/health").json() == {"status": "ok"}
        assert httpx2.get(f"{address}/metrics").status_code == 401
    with serving(scripted(processor, "a")) as address:
        own, other = {"origin": address}, {"origin": "http://evil.test"}
        rebound = {"origin": "http://evil.test", "host": "evil.test"}
        statuses = [httpx2.get(f"{address}/v1/models", headers=each).status_code
                    for each in (own, other, rebound)]  # fmt: skip
        assert statuses == [200, 403, 403]
