"""A benchmark asked at a server with OpenAI's interface, several questions at once.

The server has the template and sets the sizes of images, which travel as they are. Of vLLM's names
`top_k`, `repetition_penalty`, `stop_token_ids` and `chat_template_kwargs` are used.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from paddle_vl.families.base import EvaluationOptions
from paddle_vl.families.vlm.answering.server import ServerClient, answer_text, asked_message
from paddle_vl.families.vlm.evaluation.scorer import (
    Answer,
    Question,
    Scorer,
    answer_to,
    questions_in,
    told_scores,
)
from paddle_vl.families.vlm.evaluation.suite import Suite, open_suite, read_suite
from paddle_vl.families.vlm.inputs.processor import VLProcessor
from paddle_vl.generation.config import GenerationConfig

_NO_ANSWER = (ValueError, LookupError, TypeError, AttributeError)  # Of another form.
# Settings of generation by their names in requests.
_NAMES = {"max_new_tokens": "max_tokens", "eos_token_id": "stop_token_ids"} | {
    name: name for name in ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
}


def scores_at(url: str, model: str, key: str | None, options: EvaluationOptions) -> Iterator[str]:
    """Ask a benchmark at a server; the text that `paddle-vl evaluate` prints, in pieces.

    Answers are in the file of predictions from when they come, with their scores at the end.

    Args:
        url: before `/chat/completions`.
        model: its name there.
        key: the server's token.
        options: with a `suite`; at most `batch_size` requests are open at once.

    Raises:
        ValueError, RuntimeError: the benchmark cannot be asked, or a row has no answer.
    """
    suite = read_suite(str(options.suite))
    given, generation = suite.model_dump(exclude_defaults=True), _settings(suite)
    fields = {"model": model, **generation}
    if options.chat_template_kwargs:
        fields["chat_template_kwargs"] = {**options.chat_template_kwargs}
    # Rows are only checked with it; the server has the model's.
    dataset = open_suite(suite, VLProcessor.from_texts([], 300))
    dataset.limit = options.limit
    scorer = Scorer(suite.metrics, suite.scored_part)
    scorer.check(questions_in(dataset, 0))
    questions = (each for number in range(len(dataset)) for each in questions_in(dataset, number))
    answers = []
    for answer in _answers(_Endpoint(url, key, fields), questions, options.batch_size):
        if options.predictions:
            with options.predictions.open("a" if answers else "w", encoding="utf-8") as file:
                file.write(json.dumps(answer.to_dict(), ensure_ascii=False) + "\n")
        answers.append(answer)
    settings = {
        **{"model": model, "endpoint": url, "suite": str(options.suite), **given},
        **{"metrics": [*suite.metrics], "generation": generation},
        "chat_template_kwargs": {**options.chat_template_kwargs},
        **{"limit": options.limit, "batch_size": options.batch_size},
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


def _answers(endpoint: "_Endpoint", questions: Iterator[Question], count: int) -> Iterator[Answer]:
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
        endpoint.client.is_over.set()
        threads.shutdown(cancel_futures=True)


class _Endpoint:
    """A server; `fields` are of every request."""

    def __init__(self, url: str, key: str | None, fields: Mapping[str, Any]):
        self._url, self._fields = f"{url.rstrip('/')}/chat/completions", fields
        self.client = ServerClient(key)

    def answer(self, question: Question) -> Answer:
        """Ask a question.

        Raises:
            RuntimeError: there is no answer; says to which row.
        """
        try:
            messages = [*map(asked_message, question.prompt.messages)]
            found = self.client.post(self._url, {**self._fields, "messages": messages})
            return answer_to(question, answer_text(json.loads(found)["choices"][0]))
        except RuntimeError as error:
            raise RuntimeError(f"{question.sample}: {error}") from error
        except (OSError, *_NO_ANSWER) as error:
            told = str(error) or repr(error)
            reason = f"{question.sample}: no answer of {self._url}: {told}"
            raise RuntimeError(reason) from error
