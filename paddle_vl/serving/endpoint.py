"""A benchmark asked at a server with OpenAI's interface, several questions at once.

The server has the template and sets the sizes of images, which travel as they are. Of vLLM's names
`top_k`, `repetition_penalty`, `stop_token_ids` and `chat_template_kwargs` are used.
"""

import base64
import json
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from PIL import Image

from paddle_vl.data.media_file import ImageSource
from paddle_vl.families.base import EvaluationOptions
from paddle_vl.families.vlm.evaluation import (
    Answer,
    Question,
    Scorer,
    answer_to,
    questions_in,
    told_scores,
)
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.families.vlm.suite import Suite, open_suite, read_suite
from paddle_vl.files.plain_hub import BROKEN, opened
from paddle_vl.generation.config import GenerationConfig

_TIMEOUT_S, _MOST_WAIT_S, _SHOWN = 3600.0, 600.0, 500
# Settings of generation by their names in requests.
_SAME = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
_NAMES = {"max_new_tokens": "max_tokens", "eos_token_id": "stop_token_ids"} | dict(
    zip(_SAME, _SAME, strict=True)
)


class Endpoint:
    """A server.

    Args:
        url: before `/chat/completions`.
        key: its token; None for none.
        fields: of every request.
    """

    def __init__(self, url: str, key: str | None, fields: Mapping[str, Any]):
        self._url, self._fields = f"{url.rstrip('/')}/chat/completions", fields
        self._private = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.is_over = threading.Event()

    def answer(self, question: Question) -> Answer:
        """Ask a question, later again when the server says that it has too much to do.

        Raises:
            RuntimeError: there is no answer; says to which row.
        """
        messages = [_message(message, question.sample) for message in question.prompt.messages]
        body, waited = json.dumps({**self._fields, "messages": messages}).encode(), 0.0
        headers = {"Content-Type": "application/json"}
        while True:
            try:
                with opened(self._url, headers, self._private, _TIMEOUT_S, body) as answer:
                    content = answer.read()
                return answer_to(question, _text(json.loads(content)))
            except HTTPError as error:
                told = f"{error} {error.read(_SHOWN).decode(errors='replace')}"
                if error.code != 429 or waited >= _MOST_WAIT_S or self.is_over.is_set():
                    raise self._failed(question, told) from error
                seconds = _seconds(error.headers.get("Retry-After"))
            except BROKEN as error:
                raise self._failed(question, f"{error}: check --endpoint") from error
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise self._failed(question, f"it is no answer of a chat: {error!r}") from error
            waited += seconds
            self.is_over.wait(seconds)

    def _failed(self, question: Question, told: str) -> RuntimeError:
        return RuntimeError(f"{question.sample}: {self._url}: {told}")


def _seconds(retry_after: str | None) -> float:
    """What a server without that header is given, or with a date there, is a second."""
    try:
        return min(max(float(retry_after or 1), 0.1), _MOST_WAIT_S)
    except ValueError:
        return 1.0


def _text(answer: Any) -> str:
    """The text of an answer, with the reasoning in front as a model writes it."""
    message = answer["choices"][0]["message"]
    content = message.get("content") or ""
    thought = message.get("reasoning_content") or message.get("reasoning")
    if not thought:
        return content
    return f"{thought}</think>{content}" if content else thought


def _message(message: Mapping[str, Any], sample: str) -> dict[str, Any]:
    parts = []
    for part in message["content"]:
        if part["type"] == "image":
            part = {"type": "image_url", "image_url": {"url": _data_uri(part["image"], sample)}}
        parts.append(part)
    return {"role": message["role"], "content": parts}


def _data_uri(source: ImageSource, sample: str) -> str:
    """An image file as it is."""
    try:
        data: Any = source
        if isinstance(source, str | os.PathLike):
            data = Path(source).read_bytes()
        with Image.open(BytesIO(data)) as image:
            kind = image.get_format_mimetype()
    except OSError as error:
        raise RuntimeError(f"{sample}: an image cannot be read: {error}") from error
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def scores_at(url: str, model: str, key: str | None, options: EvaluationOptions) -> Iterator[str]:
    """Ask a benchmark at a server; the text that `paddle-vl evaluate` prints, in pieces.

    Answers are in the file of predictions from when they come, with their scores at the end.

    Args:
        model: its name there.
        key: the server's token.
        options: with a `suite`; at most `batch_size` requests are open at once.

    Raises:
        ValueError, RuntimeError: the benchmark cannot be asked, or a row has no answer.
    """
    suite = read_suite(str(options.suite))
    given = suite.model_dump(exclude_defaults=True)
    generation, template = _settings(suite), {**options.chat_template_kwargs}
    fields = {"model": model, **generation}
    fields |= {"chat_template_kwargs": template} if template else {}
    # A row is only checked with it; the server has the model's.
    dataset = open_suite(suite, VLProcessor.from_texts([], 300))
    dataset.limit = options.limit
    scorer = Scorer(suite.metrics, suite.scored_part)
    scorer.check(questions_in(dataset, 0))
    questions = (each for number in range(len(dataset)) for each in questions_in(dataset, number))
    answers = []
    for answer in _answers(Endpoint(url, key, fields), questions, options.batch_size):
        if options.predictions:
            with options.predictions.open("a" if answers else "w", encoding="utf-8") as file:
                file.write(json.dumps(answer.to_dict(), ensure_ascii=False) + "\n")
        answers.append(answer)
    settings = {
        "model": model,
        "endpoint": url,
        "suite": str(options.suite),
        **given,
        "metrics": [*suite.metrics],
        "generation": generation,
        "chat_template_kwargs": template,
        "limit": options.limit,
        "batch_size": options.batch_size,
    }
    yield from told_scores(answers, scorer, settings, options)


def _settings(suite: Suite) -> dict[str, Any]:
    """The fields of requests that say how answers are generated.

    Raises:
        ValueError: the description has a setting that no request has.
    """
    given = {"max_new_tokens": 64, "repetition_penalty": 1.0} | suite.generation
    if not given.pop("do_sample", False):
        given["temperature"] = 0.0
    names = [f"generation.{name}" for name in given if name not in _NAMES]
    names += [name for name in ("min_pixels", "max_pixels") if getattr(suite, name) is not None]
    if names:
        raise ValueError(f"{', '.join(names)}: no request to a server has it: remove it")
    if "eos_token_id" in given:
        given["eos_token_id"] = GenerationConfig().updated(**suite.generation).eos_token_ids
    return {_NAMES[name]: value for name, value in given.items()}


def _answers(endpoint: Endpoint, questions: Iterator[Question], count: int) -> Iterator[Answer]:
    """The answers in the order of the questions, of which so many are asked at once."""
    pending: deque[Future[Answer]] = deque()
    threads = ThreadPoolExecutor(count, thread_name_prefix="question")
    try:
        for question in questions:
            pending.append(threads.submit(endpoint.answer, question))
            # Some that have ended may wait for the first.
            if len(pending) == 2 * count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        endpoint.is_over.set()
        threads.shutdown(cancel_futures=True)
