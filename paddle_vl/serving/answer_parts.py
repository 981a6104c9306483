"""The text of an answer to what clients get: reasoning, content and calls of tools, as it comes.

Calls are read in both forms that Qwen's templates ask for, inside of `<tool_call>`: a JSON object,
and `<function=NAME>` with `<parameter=NAME>` (Qwen3.5).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddle_vl.data.formats.tool_calls import read_calls
from paddle_vl.generation.text_pieces import Decode, TextStream

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
# The text that ends each stage of an answer.
_ENDS = {"reasoning": THINK_END, "content": CALL, "call": CALL_END}


@dataclass
class Parts:
    """What a piece of an answer adds.

    Attributes:
        calls: name and arguments, a JSON text, of each complete call.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, other: "Parts") -> None:
        """Add what comes after these."""
        self.reasoning += other.reasoning
        self.content += other.content
        self.calls += other.calls


class AnswerReader:
    """Reads one answer, token by token.

    Args:
        decode: text of ids, without special tokens.
        stops: texts that end the answer and do not belong to it.
        is_reasoning: whether the prompt has opened the reasoning.
        tools: the schemas of the arguments by the tools' names; None if calls are not looked for.
        several: whether more than the first call counts.
        is_plain: all is content.

    Attributes:
        is_stopped: whether a text of `stops` has come; nothing may follow.
        has_calls: whether a call has come.
    """

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str] = (),
        is_reasoning: bool = False,
        tools: Mapping[str, Any] | None = None,
        several: bool = True,
        is_plain: bool = False,
    ):
        self._text, self._stops, self._tools = TextStream(decode), stops, tools
        self._several = several
        # The beginning may be a <think> that the model itself writes.
        self._stage = "content" if is_plain else "reasoning" if is_reasoning else "begin"
        self._trims = is_reasoning
        # Texts that may begin a stop, and a mark of the stage; space that may be at a part's end.
        self._unchecked = self._open = self._space = ""
        self.is_stopped = self.has_calls = False

    def push(self, token_id: int | None, is_last: bool = False) -> Parts:
        """The parts that are certain with a further token.

        Args:
            token_id: None for none.
            is_last: whether the answer ends, so that nothing is held back.
        """
        text = "" if token_id is None else self._text.push(token_id)
        text += self._text.end() if is_last else ""
        before, stop, rest = _split(self._unchecked + text, self._stops)
        self.is_stopped = stop != ""
        self._unchecked = "" if stop else rest
        if is_last and not stop:
            before += rest
        return self._read(before, is_last or self.is_stopped)

    def _read(self, text: str, is_last: bool) -> Parts:
        parts, text = Parts(), self._open + text
        if self._stage == "begin":
            begin = text.lstrip()
            if not is_last and THINK.startswith(begin[: len(THINK)]) and len(begin) < len(THINK):
                self._open = text
                return parts
            self._stage = "reasoning" if begin.startswith(THINK) else "content"
            if self._stage == "reasoning":
                text, self._trims = begin[len(THINK) :], True
        while True:
            finds = self._stage != "content" or self._tools is not None
            before, mark, text = _split(text, [_ENDS[self._stage]] if finds else [])
            if self._stage == "call":
                if mark or is_last:
                    self._add_call(parts, before if mark else before + text, mark)
                if not mark:
                    self._open = before + text
                    return parts
            else:
                if is_last and not mark:
                    before, text = before + text, ""
                self._add_text(parts, before, is_end=mark != "")
                if is_last and not mark and self._stage == "content":
                    parts.content += self._space
                if not mark:
                    self._open = text
                    return parts
            self._stage = "call" if mark == CALL else "content"
            self._trims = mark != CALL

    def _add_text(self, parts: Parts, text: str, is_end: bool) -> None:
        """Text of the stage, without space at its end, and after reasoning at its beginning."""
        text = self._space + text
        text = text.lstrip() if self._trims else text
        kept = text.rstrip()
        self._space = "" if is_end else text[len(kept) :]
        self._trims = self._trims and not kept
        if self._stage == "reasoning":
            parts.reasoning += kept
        else:
            parts.content += kept

    def _add_call(self, parts: Parts, body: str, mark: str) -> None:
        """A complete call; a broken one, and one that the answer's end cuts off, is content."""
        if mark and (call := read_call(body, self._tools or {})) is not None:
            if self._several or not self.has_calls:
                parts.calls.append(call)
            self.has_calls = True
        else:
            parts.content += CALL + body + mark


def read_call(body: str, tools: Mapping[str, Any]) -> tuple[str, str] | None:
    """The name and the arguments as JSON of the text of a call; None if it is broken."""
    try:
        if found := _FUNCTION.fullmatch(body):
            name, values = found[1].strip(), _PARAMETER.findall(found[2])
            known = (tools.get(name) or {}).get("properties") or {}
            arguments: Any = {key: _value(text, known.get(key)) for key, text in values}
        else:
            call, *_ = read_calls(body, "the answer")[0]
            name, arguments = call["function"]["name"], call["function"]["arguments"]
        return name, json.dumps(arguments, ensure_ascii=False)
    except (ValueError, RecursionError, AttributeError):
        return None


def _value(text: str, schema: Any) -> Any:
    """A parameter's value: JSON, but for texts, which are written plainly."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _split(text: str, marks: Sequence[str]) -> tuple[str, str, str]:
    """The text before the first mark, the mark and the text after it; without one, the text that
    is certain, "" and the end that may begin a mark."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        at, mark = min(found)
        return text[:at], mark, text[at + len(mark) :]
    most = max((len(mark) - 1 for mark in marks), default=0)
    for length in range(min(most, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length], "", text[-length:]
    return text, "", ""
