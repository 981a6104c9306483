"""A server with OpenAI's interface in a thread of a test, and an engine with scripted answers."""

import asyncio
import base64
import io
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import paddle
from PIL import Image

from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.serving.engine import Engine, EngineFull, Event, Request, Sampling
from paddle_vl.serving.grammars import Grammars
from paddle_vl.serving.openai_app import AppSettings, OpenAIApp, OpenAIServer
from paddle_vl.serving.openai_calls import ServedModel
from paddle_vl.serving.prompts import MediaRules, Prompts
from paddle_vl.testing import tiny_qwen3_vl_config

WAIT_S = 60


class ScriptedHandle:
    """A submitted request."""

    def __init__(self, request: Request):
        self.request, self.is_cancelled = request, threading.Event()
        self.has_ended = False
        self._events: queue.Queue[Event | Exception] = queue.Queue()

    def put(self, event: Event | Exception) -> None:
        self.has_ended = isinstance(event, Exception) or event.finish_reason is not None
        self._events.put(event)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                await asyncio.sleep(0.001)
                continue
            if isinstance(event, Exception):
                raise event
            yield event
            if event.finish_reason is not None:
                return

    def cancel(self) -> None:
        self.is_cancelled.set()


class ScriptedEngine:
    """Answers with given tokens, whatever is asked.

    Attributes:
        answers: texts of the answers in turn, the last one again and again; "wait" answers nothing
            until it is cancelled, "draw" any tokens that are allowed, an exception is raised.
        thought: ids that "draw" gives while all are allowed.
        handles: of all requests.
        most: requests that it takes before it is full.
    """

    def __init__(self, processor: VLProcessor, answers: Sequence[Any]):
        self._processor, self._end_id = processor, processor.eos_token_ids[0]
        self.answers, self.most = list(answers), 1000
        self.handles: list[ScriptedHandle] = []
        self.thought: list[int] = []
        self.has_closed = threading.Event()

    def start(self) -> None:
        pass

    def submit(self, request: Request) -> ScriptedHandle:
        if len(self.handles) >= self.most:
            raise EngineFull("too many tokens wait", 3)
        handle = ScriptedHandle(request)
        self.handles.append(handle)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        threading.Thread(target=self._run, args=(handle, answer), daemon=True).start()
        return handle

    def _run(self, handle: ScriptedHandle, answer: Any) -> None:
        if isinstance(answer, Exception):
            handle.put(answer)
            return
        sampling, ids = handle.request.sampling, []
        top = tuple((each, -2.0 - each) for each in range(sampling.logprobs or 0))
        logprob = None if sampling.logprobs is None else -1.0
        script = iter([*self._processor.tokenizer.encode(answer), self._end_id])
        while answer != "wait" and not handle.is_cancelled.is_set():
            ids.append(self._drawn(sampling, ids) if answer == "draw" else next(script))
            reason = "stop" if ids[-1] in sampling.stop_token_ids else None
            if reason is None and len(ids) == sampling.max_tokens:
                reason = "length"
            handle.put(Event(ids[-1], logprob, top, reason))
            if reason is not None:
                return
        while not (handle.is_cancelled.is_set() or self.has_closed.is_set()):
            handle.is_cancelled.wait(0.01)
        handle.put(Event(None, finish_reason="cancelled"))

    def _drawn(self, sampling: Sampling, ids: list[int]) -> int:
        allowed = None if sampling.allowed is None else sampling.allowed(ids)
        if allowed is None:
            return self.thought.pop(0)
        return int(
            np.random.default_rng([sampling.seed or 0, len(ids)]).choice(np.flatnonzero(allowed))
        )

    def close(self, seconds: float = 0.0) -> None:
        if any(not each.has_ended for each in self.handles):
            self.has_closed.wait(seconds)
        self.has_closed.set()

    def stats(self) -> dict[str, float]:
        open_ones = [each for each in self.handles if not each.is_cancelled.is_set()]
        return {"running": len(open_ones), "waiting": 0}


def scripted(processor: VLProcessor, *answers: Any, rules: MediaRules | None = None) -> ServedModel:
    """A model that gives these answers, see `ScriptedEngine`."""
    ends, vocab = processor.eos_token_ids, 448
    return ServedModel(
        cast(Engine, ScriptedEngine(processor, answers)),
        Prompts(processor, vocab, 1000, rules or MediaRules()),
        Grammars(processor.tokenizer, vocab, ends),
        ["digits", "digits-2"],
        ["doors"],
        end_ids=ends,
    )


@contextmanager
def serving(served: ServedModel, **settings: Any) -> Iterator[str]:
    """The address of a server in a thread; it ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = OpenAIServer(OpenAIApp(served, AppSettings(**{"grace_s": 0.5, **settings})))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
            assert thread.is_alive()
        try:
            yield address
        finally:
            server.should_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive()


def template_processor(folder: Path) -> VLProcessor:
    """A processor whose chat template has tools and reasoning, the forms of Qwen's."""
    words = "the digit is 1 2 3 what weather in Bern Zug name arguments tool_call think".split()
    VLProcessor.from_texts([" ".join(words)], 400, patch_size=4).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return VLProcessor.from_pretrained(folder, earlier_reasoning="drop")


def model_folder(folder: Path) -> Path:
    """A model that fits `template_processor`, and gives other answers to other questions."""
    processor = template_processor(folder)
    values = tiny_qwen3_vl_config(vocab_size=448, initializer_range=1.0).to_dict()
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    values |= {name: getattr(processor, name) for name in ids}
    config = Qwen3VLConfig.from_dict(values)
    # Else its answers, and where they end, are another test's choice.
    paddle.seed(0)
    Qwen3VLForConditionalGeneration.from_config(config).save_pretrained(folder)
    return folder


def joined(stream) -> list[dict]:
    """What a stream's choices say together."""
    found: dict[int, dict] = {}
    for chunk in stream:
        for choice in chunk.choices:
            own = found.setdefault(choice.index, {"content": "", "reasoning": "", "calls": []})
            own["content"] += choice.delta.content or ""
            own["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                assert call.index == len(own["calls"])
                own["calls"].append((call.function.name, call.function.arguments))
            own["reason"] = choice.finish_reason
    return [found[i] for i in sorted(found)]


def shown(choice) -> dict:
    """The same of a whole answer."""
    message = choice.message
    calls = [(each.function.name, each.function.arguments) for each in message.tool_calls or []]
    thought = getattr(message, "reasoning_content", "")
    content = message.content or ""
    return {
        "content": content, "reasoning": thought, "calls": calls, "reason": choice.finish_reason,
    }  # fmt: skip


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png(side: int = 32, **settings) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(stream, "PNG", **settings)
    return stream.getvalue()


def asked(source: str, kind: str = "image") -> list[dict]:
    part = {"type": f"{kind}_url", f"{kind}_url": {"url": source}}
    return [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]


_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content or [] %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking %}{{- '<think>\n' }}{%- endif %}{%- endif %}
"""
