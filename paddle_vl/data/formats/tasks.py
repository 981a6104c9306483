"""Tasks of document models: questions of rows that name one, and checks of their answers.

    {"task": "table", "image": "a.png", "answer": "<fcel>Port<nl>"}

A row's `task` is written as its question where that has no text. What an answer must be follows
from its question; where this is no prompt of a task, from the row's `task`.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.data.formats.keys import (
    LIST_KEYS,
    QUERY_KEYS,
    RESPONSE_KEYS,
    RowSettings,
    is_empty,
    wrong,
)
from paddle_vl.data.formats.otsl import read_html, read_otsl, write_otsl
from paddle_vl.data.formats.spotting import read_spotting
from paddle_vl.data.jsonl import BadSampleError

_NAME = "task"
TABLE, SPOTTING = "table", "spotting"
# Of rows with another list of turns than `messages`.
_OWN_TURNS = (*LIST_KEYS, "text_info", "src")


def with_question(row: Mapping[str, Any], tasks: Mapping[str, str]) -> dict[str, Any]:
    """A row without turns and without a question, with the prompt of its task.

    Args:
        tasks: prompts by name.

    Raises:
        BadSampleError: an answer to a task without a prompt.
    """
    keys = {key for key in row if isinstance(key, str) and not is_empty(row[key])}
    lower = {*map(str.lower, keys)}
    if keys & {*_OWN_TURNS} or lower & {*QUERY_KEYS}:
        return dict(row)
    prompt = _prompt_of(row, tasks)
    if prompt is None:
        if _NAME in keys and lower & {*RESPONSE_KEYS}:
            needed = f"one of {', '.join(tasks)} is needed where the row has no question"
            raise wrong(f"{_NAME!r}", row[_NAME], needed, "no_task")
        return dict(row)
    rest = {key: row[key] for key in row if str(key).lower() not in QUERY_KEYS}
    return {QUERY_KEYS[0]: prompt, **rest}


def check_tasks(row: Conversation, settings: RowSettings) -> None:
    """Write the prompt of the row's task where a question has no text, and check answers.

    Raises:
        BadSampleError: a question without text and without a task, or with the prompt of another;
            a task without an image; or an answer that is none of its task, of the kinds that
            `settings.checks` names.
    """
    tasks = settings.tasks
    prompt, named = _prompt_of(row.extras, tasks), row.extras.get(_NAME)
    if prompt is not None and not row.images:
        raise BadSampleError(
            "no_image", f"the row names the task {named!r} and has no image: give its 'image'"
        )
    names = {text: name for name, text in tasks.items()}
    asked = None
    for number, message in enumerate(row.messages):
        text = row.text(number).strip()
        if message["role"] == "user" and tasks:
            if not text and prompt is None:
                raise BadSampleError(
                    "no_task",
                    f"the question in turn {number + 1} has no text: write the prompt, or name the "
                    f"row's 'task': {', '.join(tasks)}",
                )
            if prompt is not None and text in names and text != prompt:
                raise BadSampleError(
                    "ambiguous",
                    f"the row names the task {named!r}, whose prompt is {prompt!r}, and asks "
                    f"{text!r}: correct one of them",
                )
            if not text:
                message["content"].append({"type": "text", "text": prompt})
            asked = names.get(text, named)
        elif message.get("loss"):
            if settings.html_tables == "otsl" and asked == TABLE and _is_html(text):
                message["content"] = [{"type": "text", "text": _as_otsl(text, number)}]
            _check_answer(row.text(number), number, asked, settings.checks)


def _prompt_of(row: Mapping[str, Any], tasks: Mapping[str, str]) -> str | None:
    name = row.get(_NAME)
    return tasks.get(name) if isinstance(name, str) else None


_READERS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "tables": (TABLE, "table in OTSL", read_otsl),
    "spotting": (SPOTTING, "list of spotted lines", read_spotting),
}


def _check_answer(text: str, number: int, task: Any, checks: Collection[str]) -> None:
    where = f"the answer in turn {number + 1}"
    if "text" in checks and not text.strip():
        raise BadSampleError(
            "empty_answer", f"{where} has no text: write what the page says, or leave the row out"
        )
    for name, (of_task, what, read) in _READERS.items():
        if name not in checks or task != of_task:
            continue
        try:
            read(text)
        except ValueError as error:
            remedy = "correct it, or leave the row out with data.on_bad_sample: skip"
            if task == TABLE and _is_html(text):
                remedy = "set data.html_tables: otsl"
            reason = f"{where} is no {what}: {error}; {remedy}"
            raise BadSampleError(f"bad_{of_task}", reason) from error


def _is_html(text: str) -> bool:
    return text.lstrip().lower().startswith(("<table", "<html"))


def _as_otsl(text: str, number: int) -> str:
    try:
        return write_otsl(read_html(text))
    except ValueError as error:
        raise BadSampleError(
            "bad_table", f"the answer in turn {number + 1} is no table in HTML: {error}"
        ) from error
