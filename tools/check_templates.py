"""Compares chat templates with recorded values of HF's `apply_chat_template`.

    python tools/check_templates.py DIR...

A folder has `jinja/NAME.jinja` (and `NAME_training.jinja`, the same with generation marks),
`conversations.json` (messages, tools, kwargs by id), `NAME.jsonl` with the recorded values of each
conversation, `tokenizer/`, and may have `environment.json` with small templates. Compared are text
or error, ids, generation prompt, dropped texts, spans of the incremental diff or its refusal, and
characters and tokens of the generation marks. Templates of `refused_with_lowered_limits` are
harmless and must be stopped by limits of 1,000. Prints a line for each template and conversation;
exits with 1 at a difference.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

from jinja2 import TemplateError
from tokenizers import Tokenizer

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.families.vlm.templates import environment
from paddle_vl.families.vlm.templates.answer_spans import incremental_spans
from paddle_vl.families.vlm.templates.encoding import MediaText, MediaTokens
from paddle_vl.families.vlm.templates.environment import SandboxedTemplate, TemplateLimitError
from paddle_vl.families.vlm.templates.messages import count_text, for_template, lost_texts
from paddle_vl.families.vlm.templates.rendering import ChatTemplateRenderer
from paddle_vl.families.vlm.templates.template_files import special_tokens

# What dated templates, and the small ones, were recorded with.
_DATE = {"date_string": "01 Jan 2026"}
_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}
_NOW = datetime(2026, 1, 1)
# Characters of a text and steps of a rendering, in place of `environment`'s own limits.
_LIMIT = 1000


def main() -> int:
    """Check the folders of the command line; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    counts = [0, 0]
    for folder in parser.parse_args().folders:
        if not folder.is_dir():
            parser.error(f"{folder} is no folder")
        for name, case, problems in check_folder(folder):
            counts[bool(problems)] += 1
            print(f"{name} {case}: {'differs in ' + ', '.join(problems) if problems else 'equal'}")
    print(f"{counts[0]} equal, {counts[1]} different")
    if not sum(counts):
        print("nothing was compared: a folder needs conversations.json and NAME.jsonl files")
    return int(bool(counts[1]) or not sum(counts))


def check_folder(folder: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Template, conversation, and names of the values that differ, of every recorded case."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    tokens = special_tokens(folder / "tokenizer")
    talks = _read(folder / "conversations.json")
    for file in sorted(folder.glob("*.jsonl")):
        template = folder / "jinja" / f"{file.stem}.jinja"
        twin = template.with_stem(f"{file.stem}_training")
        if not template.is_file():
            yield file.stem, "all", [f"everything: there is no {template}; fetch it first"]
            continue
        renderer, *marked = (
            ChatTemplateRenderer(each.read_text(encoding="utf-8"), _NOW, tokens, variables=_DATE)
            for each in (template, twin)
            if each.is_file()
        )
        for line in file.read_text(encoding="utf-8").splitlines():
            case = json.loads(line)
            actual = record(renderer, tokenizer, talks[case["id"]], *marked)
            names = sorted((case.keys() | actual.keys()) - _DERIVED)
            problems = [each for each in names if _shape(each, case) != _shape(each, actual)]
            yield file.stem, case["id"], problems
    if (small := folder / "environment.json").is_file():
        values = _read(small)
        for name, case in values["cases"].items():
            actual = _small(case["template"], {**_TOKENS, "messages": values["messages"]})
            yield "environment", name, [key for key in actual if actual[key] != case.get(key)]
        with mock.patch.multiple(environment, MAX_TEXT=_LIMIT, MAX_STEPS=_LIMIT):
            for template in values["refused_with_lowered_limits"]["templates"]:
                found = _small(template, {"messages": values["messages"]})
                stopped = found.get("error") == TemplateLimitError.__name__
                yield "limits", template[:40], [] if stopped else ["not stopped"]


# What follows from other values, or has words of its own.
_DERIVED = {"id", "marks", "diff_equals_marks"}


def record(
    renderer: ChatTemplateRenderer,
    tokenizer: Tokenizer,
    talk: Mapping[str, Any],
    marked: ChatTemplateRenderer | None = None,
) -> dict[str, Any]:
    """The values of a conversation, named as in the recorded files.

    Args:
        marked: of the same template with generation marks, which count where its text is the same.
    """
    messages, tools, variables = talk["messages"], talk.get("tools"), talk.get("kwargs")
    messages = [for_template(message) for message in messages]

    def render(part: Any, prompt: bool = False) -> str:
        return renderer.render(part, tools, prompt, variables).text

    try:
        text, spans = renderer.render(messages, tools, False, variables)
    except BadSampleError as error:
        return {"error": type(error.__cause__).__name__}
    if spans is None and marked is not None:
        with suppress(BadSampleError):
            twin = marked.render(messages, tools, False, variables)
            spans = twin.spans if twin.text == text else None
    encoding = tokenizer.encode(text, add_special_tokens=False)
    values: dict[str, Any] = {"text": text, "ids": encoding.ids}
    try:
        whole = render(messages, True)
        starts = whole.startswith(text)
        values["generation_prompt"] = whole[len(text) :] if starts else {"whole": whole}
    except BadSampleError as error:
        values["generation_prompt"] = {"error": type(error.__cause__).__name__}
    lost = lost_texts(_conversation(messages, tools), text)
    if dropped := [each for each in lost if not count_text(each, text)]:
        values["dropped"] = dropped
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        values["diff"] = {"ok": True, "spans": incremental_spans(render, messages, text, answers)}
    except BadSampleError:
        values["diff"] = {"ok": False}
    if spans is not None:
        values["mark_spans"] = spans
        # No placeholder is repeated here, as in the recorded ids.
        plain = MediaText(tokenizer, MediaTokens("\ue0fe", "\ue0fd", "", ""))
        labels = plain.encode(
            text, [span for span in spans if span[0] < span[1]], (), (), ()
        ).labels
        values["mask"] = "".join(str(int(label != IGNORE_INDEX)) for label in labels)
    return values


def _shape(name: str, values: Mapping[str, Any]) -> Any:
    """A value without what has words of its own, as JSON has it."""
    value = values.get(name)
    if name == "error" or (isinstance(value, dict) and "error" in value):
        return str(value["error"] if isinstance(value, dict) else value).split(":")[0]
    if name == "diff" and isinstance(value, dict):
        value = {key: value.get(key) for key in ("ok", "spans")}
    return json.loads(json.dumps(value))


def _conversation(messages: list[dict[str, Any]], tools: Any) -> Conversation:
    """A recorded conversation in the canonical form, which has parts and objects as arguments."""
    canonical: Any = []
    for message in messages:
        content, calls = message.get("content"), message.get("tool_calls") or []
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        functions = [call["function"] for call in calls]
        calls = [
            {"function": each if isinstance(each["arguments"], dict) else {**each, "arguments": {}}}
            for each in functions
        ]
        canonical.append({**message, "content": parts, "tool_calls": calls})
    return Conversation(canonical, tools=tools or [])


def _small(template: str, variables: Mapping[str, Any]) -> dict[str, str]:
    try:
        return {"text": SandboxedTemplate(template, _NOW).render(variables).text}
    except (TemplateError, TypeError, OverflowError) as error:
        return {"error": type(error).__name__, "message": str(error)}


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
