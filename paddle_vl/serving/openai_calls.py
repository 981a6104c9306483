"""A request of OpenAI's interface to requests of the engine, and their events to its answer."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paddle_vl.data.formats.tool_calls import read_tools
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.generation.config import GenerationConfig
from paddle_vl.serving.answer_parts import AnswerReader, Parts
from paddle_vl.serving.engine import Engine, Event, Request, Sampling
from paddle_vl.serving.grammars import Grammars, choice_rule, json_rule, regex_rule
from paddle_vl.serving.openai_protocol import (
    AdapterRequest,
    ApiError,
    ChatRequest,
    CompletionRequest,
    WeightsRequest,
    parsed,
)
from paddle_vl.serving.prompts import Prompts, ServedPrompt

# JSON has no -inf; vLLM writes this.
_LEAST = -9999.0
_MOST_ANSWERS = 128
# Settings that a model's files may give, and what they are without.
_USUAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}


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
        logprobs_mode: see `Sampling`.
        weights_folder: whose folders may be loaded; None for none.
    """

    engine: Engine
    prompts: Prompts
    grammars: Grammars
    names: Sequence[str]
    adapters: list[str] = field(default_factory=list)
    defaults: GenerationConfig | None = None
    end_ids: Sequence[int] = ()
    max_tokens: int = 2048
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    weights_folder: Path | None = None

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

    def load(self, request: AdapterRequest | WeightsRequest) -> None:
        """Take the weights of a folder, for what is asked from now on.

        Raises:
            ApiError: the folder may not be read, or does not fit.
        """
        adapter, path = None, ""
        if isinstance(request, AdapterRequest):
            adapter, path = request.lora_name, request.lora_path
            if adapter in self.names or (adapter in self.adapters and not request.load_inplace):
                reason = f"there is {adapter} already; an adapter is replaced with load_inplace"
                raise ApiError(400, reason, "lora_name")
        else:
            path = request.model_path
        allowed = self.weights_folder
        if allowed is None:
            raise ApiError(403, "weights are not loaded (start with --allowed-weights-path)")
        folder = (allowed / path).resolve()
        if not folder.is_relative_to(allowed.resolve()):
            raise ApiError(403, "the folder is not in that of --allowed-weights-path")
        try:
            if adapter is None:
                self.engine.change(lambda model: model.load_weights(folder))
            else:
                self.engine.change(lambda model: model.load_adapter(adapter, folder))
        except (ValueError, RuntimeError, OSError) as error:
            raise ApiError(400, str(error)) from error
        if adapter is not None and adapter not in self.adapters:
            self.adapters.append(adapter)


@dataclass
class Choice:
    """One of the answers of a call.

    Attributes:
        request: to the engine.
        parts, logprobs: what has come.
        ids: that were chosen, with the one that ends the answer.
        finish_reason: None while it runs.
    """

    index: int
    request: Request
    reader: AnswerReader
    parts: Parts = field(default_factory=Parts)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Call:
    """A checked request with its prompts.

    Attributes:
        choices: `n` answers to each prompt.
    """

    def __init__(
        self,
        served: ServedModel,
        request: ChatRequest | CompletionRequest,
        prompts: Sequence[ServedPrompt],
        tools: Mapping[str, Any] | None = None,
    ):
        """Raises an ApiError for what does not fit the model.

        Args:
            tools: the schemas of the arguments by the tools' names.
        """
        self.request, self._served, self._tools = request, served, tools
        self._is_chat = isinstance(request, ChatRequest)
        self._num_prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model or served.names[0],
        }
        adapter, self.choices = served.adapter_of(request.model), []
        for prompt in prompts:
            for sampling in self._samplings(prompt):
                asked = Request(prompt.ids, sampling, prompt.visual, adapter)
                index = len(self.choices)
                self.choices.append(Choice(index, asked, self._reader(prompt)))

    def _reader(self, prompt: ServedPrompt) -> AnswerReader:
        decode, stops = self._served.prompts.processor.decode, self.request.stop
        if isinstance(self.request, CompletionRequest):
            return AnswerReader(decode, stops, is_plain=True)
        several = self.request.parallel_tool_calls
        return AnswerReader(decode, stops, prompt.opens_reasoning, self._tools or None, several)

    def _samplings(self, prompt: ServedPrompt) -> list[Sampling]:
        """The settings of the answers to a prompt; each has a seed of its own."""
        request, served = self.request, self._served
        room = served.prompts.max_length - len(prompt.ids)
        limit = request.limit or min(served.max_tokens, room)
        served.prompts.check_length(len(prompt.ids), limit)
        of_files = served.defaults if served.defaults and served.defaults.do_sample else None
        settings = {}
        for name, usual in _USUAL.items():
            given = getattr(request, name)
            settings[name] = getattr(of_files, name, usual) if given is None else given
        settings["top_k"] = max(settings["top_k"], 0)  # -1 is 0 in vLLM.
        if request.return_token_ids and request.stream:
            raise ApiError(400, "return_token_ids: give it without 'stream'", "return_token_ids")
        if max(request.suppressed, default=0) >= served.prompts.vocab:
            raise ApiError(400, f"logit_bias: there is no token {max(request.suppressed)}")
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
                suppress_tokens=request.suppressed,
                logprobs=request.num_logprobs,
                logprobs_mode=served.logprobs_mode,
                allowed=None if constraint is None else constraint.copy(),
            )
            for i in range(request.n)
        ]

    def _constraint(self, prompt: ServedPrompt) -> Any:
        """What answers keep; None for nothing."""
        form, found = self.request.structured_outputs, {}
        if form is not None and form.json_ is not None:
            found["structured_outputs.json"] = json_rule(form.json_)
        if form is not None and form.regex is not None:
            found["structured_outputs.regex"] = regex_rule(form.regex)
        if form is not None and form.choice is not None:
            found["structured_outputs.choice"] = choice_rule(form.choice)
        if isinstance(self.request, ChatRequest):
            if (schema := self.request.schema_of_answer) is not None:
                found["response_format"] = json_rule(schema)
            if self.request.tool_choice not in ("none", "auto"):
                found["tool_choice"] = self._forced_calls(self.request)
        if len(found) > 1:
            raise ApiError(400, f"{' and '.join(found)} exclude each other: give one of them")
        for name, rules in found.items():
            try:
                return self._served.grammars.compiled(rules, prompt.opens_reasoning)
            except ValueError as error:
                raise ApiError(400, f"{name} cannot be kept: {error}", name) from error
        return None

    def _forced_calls(self, request: ChatRequest) -> str:
        """The rules of the calls that must be made."""
        choice, tools, several = request.tool_choice, self._tools, request.parallel_tool_calls
        if isinstance(choice, Mapping):
            function = choice.get("function") if choice.get("type") == "function" else None
            name = function.get("name") if isinstance(function, Mapping) else None
            tools, several = {n: each for n, each in (tools or {}).items() if n == name}, False
        if not tools:
            raise ApiError(400, "tool_choice: none of 'tools' has this name", "tool_choice")
        return self._served.grammars.calls(tools, several)

    def take(self, choice: Choice, event: Event) -> dict[str, Any] | None:
        """Add an event to a choice, which ends at a text of `stop` too.

        Returns:
            The chunk of a stream; None if there is nothing to show.
        """
        choice.ids += [] if event.token_id is None else [event.token_id]
        # A token that ends an answer is no text.
        shown = None if event.finish_reason == "stop" else event.token_id
        parts = choice.reader.push(shown, event.finish_reason is not None)
        logprobs, told = [], event.token_id if self.request.return_token_ids else shown
        if self.request.num_logprobs is not None and told is not None:
            top = [self._logprob(*each) for each in event.top_logprobs]
            logprobs = [{**self._logprob(told, event.logprob), "top_logprobs": top}]
        reason = "stop" if choice.reader.is_stopped else event.finish_reason
        if reason == "stop" and choice.reader.has_calls:
            reason = "tool_calls"
        choice.finish_reason = reason
        first_call = len(choice.parts.calls)
        choice.parts.add(parts)
        choice.logprobs += logprobs
        if parts == Parts() and not logprobs and reason is None:
            return None
        delta = {"delta": _delta(parts, first_call)} if self._is_chat else {"text": parts.content}
        return self._chunk(choice.index, delta, logprobs, reason)

    def first_chunks(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        start = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(each.index, start) for each in self.choices if self._is_chat]

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk, where it is asked for."""
        return {**self._chunk(0, {}), "choices": [], "usage": self.usage}

    def whole(self) -> dict[str, Any]:
        """The answer when all choices have ended."""
        gives_ids, prompt = self.request.return_token_ids, {}
        if gives_ids and self._is_chat:
            prompt = {"prompt_token_ids": self.choices[0].request.input_ids.tolist()}
        choices = [
            {
                "index": each.index,
                **({"token_ids": each.ids} if gives_ids else {}),
                **self._shown(each.parts),
                "logprobs": self._shown_logprobs(each.logprobs),
                "finish_reason": each.finish_reason,
            }
            for each in self.choices
        ]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, **prompt, "choices": choices, "usage": self.usage}

    @property
    def usage(self) -> dict[str, int]:
        """Tokens so far."""
        asked, answered = self._num_prompt_tokens, sum(len(each.ids) for each in self.choices)
        return {
            "prompt_tokens": asked,
            "completion_tokens": answered,
            "total_tokens": asked + answered,
        }

    def _shown(self, parts: Parts) -> dict[str, Any]:
        """A whole answer."""
        if not self._is_chat:
            return {"text": parts.content}
        delta = _delta(parts)
        for call in delta.get("tool_calls", ()):
            del call["index"]
        empty = {"content": None if parts.calls else "", "refusal": None}
        return {"message": {"role": "assistant", **empty, **delta}}

    def _chunk(
        self,
        index: int,
        shown: Mapping[str, Any],
        logprobs: Sequence[Mapping[str, Any]] = (),
        reason: str | None = None,
    ) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        found = self._shown_logprobs(logprobs) if logprobs else None
        choice = {"index": index, **shown, "logprobs": found, "finish_reason": reason}
        return {**self._head, "object": kind, "choices": [choice]}

    def _logprob(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        data = self._served.grammars.token_bytes(token_id)
        value = _LEAST if logprob is None else max(logprob, _LEAST)
        return {"token": data.decode(errors="replace"), "logprob": value, "bytes": [*data]}

    def _shown_logprobs(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        if self.request.num_logprobs is None:
            return None
        if self._is_chat:
            return {"content": [*entries], "refusal": None}
        tops = [{_key(e): e["logprob"] for e in entry["top_logprobs"]} for entry in entries]
        return {
            "tokens": [*map(_key, entries)],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": tops,
        }


def _key(entry: Mapping[str, Any]) -> str:
    """A token by which it differs from all others; parts of characters as OpenAI writes them."""
    data = bytes(entry["bytes"])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{each:02x}" for each in data)


def _delta(parts: Parts, first_call: int = 0) -> dict[str, Any]:
    """What a piece adds to a message."""
    texts = {"reasoning_content": parts.reasoning, "content": parts.content}
    delta: dict[str, Any] = {name: text for name, text in texts.items() if text}
    if parts.calls:
        delta["tool_calls"] = [
            {
                "index": index,
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(parts.calls, first_call)
        ]
    return delta


def chat_call(served: ServedModel, body: bytes) -> Call:
    """The call of a body; takes a while, and runs in any thread.

    Raises:
        ApiError: it is refused.
    """
    request = parsed(body, ChatRequest)
    served.adapter_of(request.model)
    try:
        # Without calls the model need not know of them.
        given = [] if request.tool_choice == "none" else request.tools
        tools = read_tools(given)
    except BadSampleError as error:
        raise ApiError(400, error.reason, "tools") from error
    prompt = served.prompts.of_chat(request.messages, given, request.chat_template_kwargs)
    functions = [tool["function"] for tool in tools]
    schemas = {each["name"]: each.get("parameters") for each in functions}
    return Call(served, request, [prompt], schemas)


def completion_call(served: ServedModel, body: bytes) -> Call:
    """As `chat_call`, of texts."""
    request = parsed(body, CompletionRequest)
    given: Any = request.prompt
    is_single = isinstance(given, str) or isinstance(given[0], int)
    texts = [given] if is_single else given
    if len(texts) * request.n > _MOST_ANSWERS:
        raise ApiError(400, f"prompt: at most {_MOST_ANSWERS} answers of one request", "prompt")
    prompts = [served.prompts.of_text(each) for each in texts]
    return Call(served, request, prompts)


def json_bytes(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
