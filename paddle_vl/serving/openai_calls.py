"""A request of OpenAI's interface to requests of the engine, and their events to its answer."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paddle_vl.data.formats.tool_calls import read_tools
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.generation.config import GenerationConfig
from paddle_vl.serving.answer_parts import AnswerReader, Parts
from paddle_vl.serving.engine import Engine, Event, Request, Sampling
from paddle_vl.serving.grammars import ANY_OBJECT, Grammars, choice_rule, json_rule, regex_rule
from paddle_vl.serving.openai_protocol import (
    AnyRequest,
    ApiError,
    ChatRequest,
    CompletionRequest,
    parsed,
)
from paddle_vl.serving.prompts import Prompt, Prompts

# JSON has no -inf; vLLM writes this.
_LEAST = -9999.0


@dataclass(frozen=True)
class ServedModel:
    """A model, and what requests to it need.

    Attributes:
        engine: runs it; anything with the methods of an `Engine`.
        names: of the model; the first one is told.
        adapters: names of the engine's adapters.
        defaults: settings of the model's files, which count for sampling if they sample.
        end_ids: tokens that end an answer.
        max_tokens: of an answer, where a chat does not say.
    """

    engine: Engine
    prompts: Prompts
    grammars: Grammars
    names: Sequence[str]
    adapters: Sequence[str] = ()
    defaults: GenerationConfig | None = None
    end_ids: Sequence[int] = ()
    max_tokens: int = 2048

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter of a request's `model`; None for the base model.

        Raises:
            ApiError: of status 404: there is no such model.
        """
        if name is not None and name not in (*self.names, *self.adapters):
            known = ", ".join((*self.names, *self.adapters))
            message = f"The model {name[:100]!r} does not exist; there is {known}"
            raise ApiError(404, message, "model", "model_not_found")
        return name if name in self.adapters else None


@dataclass
class Choice:
    """One of the answers of a call.

    Attributes:
        request: to the engine.
        parts: all that has come, with their log-probabilities.
        finish_reason: None while it runs.
    """

    index: int
    request: Request
    reader: AnswerReader
    parts: Parts = field(default_factory=Parts)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None


class Piece(NamedTuple):
    """What an event adds to a choice."""

    parts: Parts
    logprobs: list[dict[str, Any]]
    finish_reason: str | None


class Call:
    """A request that is checked, with its prompts.

    Attributes:
        choices: its answers.
        prompt_tokens: of all prompts.
    """

    kind = "text_completion"
    chunk_kind = kind

    def __init__(self, served: ServedModel, request: AnyRequest, prompts: Sequence[Prompt]):
        self.request, self._served = request, served
        self.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self.model = request.model or served.names[0]
        self.id = f"{'chatcmpl' if isinstance(self, ChatCall) else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        adapter = served.adapter_of(request.model)
        self.choices = []
        for prompt in prompts:
            samplings = self._samplings(prompt)
            for sampling in samplings:
                engine_request = Request(prompt.ids, sampling, prompt.visual, adapter)
                index = len(self.choices)
                self.choices.append(Choice(index, engine_request, self._reader(prompt)))

    def _samplings(self, prompt: Prompt) -> list[Sampling]:
        """The settings of the answers to a prompt; each has a seed of its own."""
        request, served = self.request, self._served
        room = served.prompts.max_length - len(prompt.ids)
        limit = request.limit or min(served.max_tokens, room)
        served.prompts.check_length(len(prompt.ids), limit)
        own = served.defaults if served.defaults and served.defaults.do_sample else None
        usual = {
            name: getattr(own, name) if own else value
            for name, value in _USUAL.items()
            if getattr(request, name) is None
        }
        given = {name: getattr(request, name) for name in _USUAL.keys() - usual.keys()}
        settings: dict[str, Any] = {**usual, **given}
        settings["top_k"] = max(settings["top_k"], 0)  # -1 is 0 in vLLM.
        constraint = self._constraint(prompt)
        return [
            Sampling(
                limit,
                **settings,
                min_p=request.min_p,
                presence_penalty=request.presence_penalty,
                frequency_penalty=request.frequency_penalty,
                seed=None if request.seed is None else (request.seed + i) % 2**63,
                stop_token_ids=(*served.end_ids, *request.stop_token_ids),
                logprobs=self.num_logprobs,
                allowed=None if constraint is None else constraint.copy(),
            )
            for i in range(request.n)
        ]

    def _constraint(self, prompt: Prompt) -> Any:
        rules = self._rules()
        if not rules:
            return None
        if len(rules) > 1:
            names = " and ".join(rules)
            raise ApiError(400, f"{names} exclude each other: give one of them")
        name, text = rules.popitem()
        try:
            return self._served.grammars.compiled(text, prompt.opens_reasoning)
        except ValueError as error:
            raise ApiError(400, f"{name} cannot be kept: {error}", name) from error

    def _rules(self) -> dict[str, str]:
        """Rules that answers keep, by what asks for them."""
        form = self.request.structured_outputs
        if form is None:
            return {}
        found = {
            "structured_outputs.json": form.json_ is not None and json_rule(form.json_),
            "structured_outputs.regex": form.regex is not None and regex_rule(form.regex),
            "structured_outputs.choice": form.choice is not None and choice_rule(form.choice),
        }
        return {name: rule for name, rule in found.items() if rule}

    def _reader(self, prompt: Prompt) -> AnswerReader:
        # A text has no parts.
        return AnswerReader(self._decode, self.request.stops, is_plain=True)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._served.prompts.processor.decode(ids)

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens that are given beside each; None without log-probabilities."""
        return self.request.logprobs  # type: ignore[attr-defined]

    def take(self, choice: Choice, event: Event) -> Piece:
        """Add an event to a choice; the choice ends at a text of `stop` too."""
        is_end_token = event.finish_reason == "stop"
        choice.num_tokens += event.token_id is not None
        shown = None if is_end_token else event.token_id
        parts = choice.reader.push(shown, event.finish_reason is not None)
        logprobs = []
        if self.num_logprobs is not None and shown is not None:
            logprobs = [self._logprob(shown, event.logprob, event.top_logprobs)]
        reason = "stop" if choice.reader.is_stopped else event.finish_reason
        if reason == "stop" and choice.reader.has_calls:
            reason = "tool_calls"
        choice.finish_reason = reason
        choice.parts.reasoning += parts.reasoning
        choice.parts.content += parts.content
        choice.parts.calls += parts.calls
        choice.logprobs += logprobs
        return Piece(parts, logprobs, reason)

    def _logprob(
        self, token_id: int, logprob: float | None, top: Sequence[tuple[int, float]] = ()
    ) -> dict[str, Any]:
        data = self._served.grammars.token_bytes(token_id)
        shown = {
            "token": data.decode(errors="replace"),
            "logprob": _LEAST if logprob is None else max(logprob, _LEAST),
            "bytes": [*data],
        }
        return {**shown, "top_logprobs": [self._logprob(*each) for each in top]}

    @property
    def usage(self) -> dict[str, int]:
        """Tokens so far."""
        answers = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": answers,
            "total_tokens": self.prompt_tokens + answers,
        }

    def whole(self) -> dict[str, Any]:
        """The answer when all choices have ended."""
        choices = [
            {
                "index": choice.index,
                **self._shown(choice.parts),
                "logprobs": self._shown_logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for choice in self.choices
        ]
        return {**self._head(self.kind), "choices": choices, "usage": self.usage}

    def first_chunks(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        return []

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        """A piece in a stream; None if it shows nothing."""
        delta = self._delta(choice, piece.parts)
        if not (delta or piece.logprobs or piece.finish_reason):
            return None
        return self._chunk(choice.index, delta, piece.logprobs, piece.finish_reason)

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk, where it is asked for."""
        return {**self._head(self.chunk_kind), "choices": [], "usage": self.usage}

    def _chunk(
        self, index: int, delta: Mapping[str, Any], logprobs: Any = (), reason: str | None = None
    ) -> dict[str, Any]:
        shown = self._in_chunk(delta)
        logprobs = self._shown_logprobs(logprobs) if logprobs else None
        choice = {"index": index, **shown, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head(self.chunk_kind), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.model}

    def _shown(self, parts: Parts) -> dict[str, Any]:
        return {"text": parts.content}

    def _delta(self, choice: Choice, parts: Parts) -> dict[str, Any]:
        return {"text": parts.content} if parts.content else {}

    def _in_chunk(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"text": delta.get("text", "")}

    def _shown_logprobs(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        if self.num_logprobs is None:
            return None
        lists: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        for entry in entries:
            lists["tokens"].append(entry["token"])
            lists["token_logprobs"].append(entry["logprob"])
            top = {each["token"]: each["logprob"] for each in entry["top_logprobs"]}
            lists["top_logprobs"].append(top)
        return lists


class ChatCall(Call):
    """A call of `/v1/chat/completions`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    request: ChatRequest

    def __init__(
        self, served: ServedModel, request: ChatRequest, prompt: Prompt, tools: Mapping[str, Any]
    ):
        self._tools = tools
        super().__init__(served, request, [prompt])

    @property
    def num_logprobs(self) -> int | None:
        return (self.request.top_logprobs or 0) if self.request.logprobs else None

    def _reader(self, prompt: Prompt) -> AnswerReader:
        several = self.request.parallel_tool_calls
        opened, stops = prompt.opens_reasoning, self.request.stops
        return AnswerReader(self._decode, stops, opened, self._tools or None, several)

    def _rules(self) -> dict[str, str]:
        found, request = super()._rules(), self.request
        form = request.response_format
        if form is not None and form.type == "json_object":
            found["response_format"] = json_rule(ANY_OBJECT)
        if form is not None and form.type == "json_schema":
            if form.json_schema is None:
                reason = "response_format: json_schema is missing"
                raise ApiError(400, reason, "response_format.json_schema")
            found["response_format"] = json_rule(form.json_schema.schema_)
        choice = request.tool_choice
        if choice in ("none", "auto"):
            return found
        tools = self._tools
        several = request.parallel_tool_calls
        if isinstance(choice, Mapping):
            function = choice.get("function") if choice.get("type") == "function" else None
            name = function.get("name") if isinstance(function, Mapping) else None
            tools, several = {each: tools[each] for each in tools if each == name}, False
        if not tools:
            raise ApiError(400, "tool_choice: none of 'tools' has this name", "tool_choice")
        try:
            found["tool_choice"] = self._served.grammars.calls(tools, several)
        except (AttributeError, TypeError) as error:
            reason = "the parameters of a tool are no JSON schema"
            raise ApiError(400, f"tools: {reason}", "tools") from error
        return found

    def first_chunks(self) -> list[dict[str, Any]]:
        start = {"role": "assistant", "content": ""}
        return [self._chunk(choice.index, start) for choice in self.choices]

    def _shown(self, parts: Parts) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": parts.content or None}
        message["refusal"] = None
        if not (parts.content or parts.calls):
            message["content"] = ""
        if parts.reasoning:
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            message["tool_calls"] = [_shown_call(call) for call in parts.calls]
        return {"message": message}

    def _delta(self, choice: Choice, parts: Parts) -> dict[str, Any]:
        texts = {"reasoning_content": parts.reasoning, "content": parts.content}
        delta: dict[str, Any] = {name: text for name, text in texts.items() if text}
        if parts.calls:
            first = len(choice.parts.calls) - len(parts.calls)
            calls = enumerate(map(_shown_call, parts.calls), first)
            delta["tool_calls"] = [{"index": i, **call} for i, call in calls]
        return delta

    def _in_chunk(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"delta": {**delta}}

    def _shown_logprobs(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        if self.num_logprobs is None:
            return None
        return {"content": [*entries], "refusal": None}


# Settings that a model's files may give, and what they are without.
_USUAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}


def chat_call(served: ServedModel, body: bytes) -> Call:
    """The call of a body; takes a while, and runs in any thread.

    Raises:
        ApiError: it is refused.
    """
    request = parsed(body, ChatRequest)
    served.adapter_of(request.model)
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs 'logprobs': true", "top_logprobs")
    try:
        # Without calls the model need not know of them.
        tools = [] if request.tool_choice == "none" else read_tools(request.tools)
    except BadSampleError as error:
        raise ApiError(400, error.reason, "tools") from error
    prompt = served.prompts.of_chat(request.messages, tools, request.chat_template_kwargs)
    functions = [tool["function"] for tool in tools]
    schemas = {each["name"]: each.get("parameters") for each in functions}
    return ChatCall(served, request, prompt, schemas)


def completion_call(served: ServedModel, body: bytes) -> Call:
    """As `chat_call`, of texts."""
    request = parsed(body, CompletionRequest)
    served.adapter_of(request.model)
    given: Any = request.prompt
    is_single = isinstance(given, str) or isinstance(given[0], int)
    prompts = [served.prompts.of_text(each) for each in ([given] if is_single else given)]
    if len(prompts) * request.n > 128:
        raise ApiError(400, "prompt: at most 128 answers of one request", "prompt")
    return Call(served, request, prompts)


def _shown_call(call: tuple[str, str]) -> dict[str, Any]:
    name, arguments = call
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def json_bytes(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
