"""The text of an answer to what clients get: reasoning, content and calls of tools, as it comes.

Calls are read in both forms that Qwen's templates ask for, inside of `<tool_call>`: a JSON object,
and `<function=NAME>` with `<parameter=NAME>` (Qwen3.5), whose values are plain texts that the
tool's schema gives their types. What vLLM's parsers of both forms (0.33) read is read alike, but a
call that is broken, or short of a parameter, stays text.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paddle_vl.data.formats.keys import from_text
from paddle_vl.data.formats.tool_schemas import property_schema, types_of
from paddle_vl.data.jsonl import check_unicode, parse_value
from paddle_vl.generation.text_pieces import Decode, TextStream

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


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
        # The stage that a call began in, and whether reasoning before one may still be closed.
        self._stage_before, self._is_unclosed = self._stage, False
        self._trims, self._has_content = is_reasoning, False
        # Texts that may begin a mark of the stage, and a stop; space that may be at a part's end.
        self._open = self._unchecked = self._space = ""
        self.is_stopped = self.has_calls = False

    def push(self, token_id: int | None, is_last: bool = False) -> Parts:
        """The parts that are certain with a further token.

        Args:
            token_id: None for none.
            is_last: whether the answer ends, so that nothing is held back.
        """
        text = self._open + ("" if token_id is None else self._text.push(token_id))
        text += self._text.end() if is_last else ""
        parts, self._open = Parts(), ""
        if self._stage == "begin":
            begin = text.lstrip()
            if not is_last and THINK.startswith(begin[: len(THINK)]) and len(begin) < len(THINK):
                self._open = text
                return parts
            self._stage = "reasoning" if begin.startswith(THINK) else "content"
            if self._stage == "reasoning":
                text, self._trims = begin[len(THINK) :], True
        while True:
            before, mark, text = _split(text, self._marks())
            if is_last and not mark:
                before, text = before + text, ""
            if self._stage != "call":
                self._add_text(parts, before, is_end=is_last or mark != "")
                self._turn(mark)
            elif mark == CALL_END:
                self._add_call(parts, before)
            elif mark or is_last:
                self._stage, text = self._stage_before, mark + text
                self._add_text(parts, CALL + before, is_end=is_last)
            else:
                text = before + text
            if not mark or self.is_stopped:
                break
        self._open = text
        ends = is_last or self.is_stopped
        if ends and self._stage == "content" and not self.has_calls:
            parts.content += self._space
        return parts

    def _marks(self) -> list[str]:
        """Texts that end the stage."""
        if self._stage == "call":
            return [CALL_END, THINK_END] if self._stage_before == "reasoning" else [CALL_END]
        marks = [] if self._tools is None else [CALL]
        return [*marks, THINK_END] if self._stage == "reasoning" or self._is_unclosed else marks

    def _turn(self, mark: str) -> None:
        """Go to the next stage."""
        if mark == CALL and not self.is_stopped:
            self._stage, self._stage_before = "call", self._stage
        elif mark == THINK_END:
            self._stage, self._is_unclosed = "content", False
            self._drop_space()

    def _drop_space(self) -> None:
        """Leave out space at the beginning of the content, and what is held of the reasoning's."""
        if not self._has_content:
            self._space, self._trims = "", True

    def _add_text(self, parts: Parts, text: str, is_end: bool) -> None:
        """Text of the stage, without space at its end, and after reasoning at its beginning."""
        text = text.lstrip() if self._trims else text
        self._trims = self._trims and not text
        if self._stage == "content":
            text, stop, self._unchecked = _split(self._unchecked + text, self._stops)
            self.is_stopped = stop != ""
            if is_end and not stop:
                text, self._unchecked = text + self._unchecked, ""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if self._stage == "reasoning":
            parts.reasoning += kept
        else:
            parts.content += kept
            self._has_content = self._has_content or kept != ""

    def _add_call(self, parts: Parts, body: str) -> None:
        """A complete call, which ends reasoning; a broken one is text."""
        tools, lead, text = self._tools or {}, "", CALL + body + CALL_END
        call = read_call(body, tools)
        if call is None and CALL in body:
            # A mark that nothing ends may stand before it.
            lead, _, last = text.rpartition(CALL)
            call = read_call(last.removesuffix(CALL_END), tools)
        self._stage = self._stage_before
        if call is None or lead:
            self._add_text(parts, text if call is None else lead, is_end=call is not None)
        if call is None or self.is_stopped:
            return
        if self._several or not self.has_calls:
            parts.calls.append(call)
        self.has_calls, self._is_unclosed = True, self._is_unclosed or self._stage == "reasoning"
        self._stage = "content"
        self._drop_space()


def read_call(body: str, tools: Mapping[str, Any]) -> tuple[str, str] | None:
    """The name and the arguments as JSON of the text of a call; None if it is broken.

    Args:
        tools: the schemas of the arguments by the tools' names.
    """
    try:
        if found := _FUNCTION.fullmatch(body):
            name = found[1].strip()
            arguments = _parameters(found[2], tools.get(name))
        else:
            call = parse_value(body)
            name, arguments = call["name"], from_text(call["arguments"])
        if not (isinstance(name, str) and name and isinstance(arguments, dict)):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        check_unicode(name + text)
    except (ValueError, LookupError, TypeError):
        return None
    return name, text


def _parameters(text: str, schema: Any) -> dict[str, Any]:
    """The arguments within a function; a ValueError if the end of one is missing."""
    first, *others = text.split(_PARAMETER)
    if first.strip():
        raise ValueError("a text is no parameter")
    arguments = {}
    for each in others:
        name, begun, value = each.rstrip().partition(">")
        if not (name and begun and value.endswith(_PARAMETER_END)):
            raise ValueError("a parameter does not end")
        value = value.removesuffix(_PARAMETER_END).removeprefix("\n").removesuffix("\n")
        types = types_of(property_schema(schema, name, schema), schema)
        arguments[name] = _value(value, types)
    return arguments


def _value(text: str, types: Collection[str]) -> Any:
    """The value of a text: of the first type that it can have, in vLLM's order, else the text."""
    for name, read in _READERS.items():
        if name in types:
            with suppress(ValueError, LookupError):
                return read(text)
    return text


def _number(text: str) -> int | float:
    with suppress(ValueError):
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("it is no number of JSON")
    return int(value) if value.is_integer() else value


def _integer(text: str) -> int:
    if isinstance(value := _number(text), float):
        raise ValueError("it is no integer")
    return value


def _parsed(text: str, kind: type) -> Any:
    if not isinstance(value := parse_value(text), kind):
        raise ValueError(f"it is no {kind.__name__}")
    return value


# Qwen3.5's template writes None, True and False as Python does.
_NULLS = {"null": None, "None": None}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_READERS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: _NULLS[text.strip()],
    "integer": _integer,
    "number": _number,
    "boolean": lambda text: _BOOLEANS[text.strip().lower()],
    "object": lambda text: _parsed(text, dict),
    "array": lambda text: _parsed(text, list),
}


def _split(text: str, marks: Sequence[str]) -> tuple[str, str, str]:
    """The text before the mark that ends first, it and the text after it; without one, the text
    that is certain, "" and the end that may begin a mark."""
    found = [(at + len(mark), at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        _, at, mark = min(found)
        return text[:at], mark, text[at + len(mark) :]
    most = max((len(mark) - 1 for mark in marks), default=0)
    for length in range(min(most, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length], "", text[-length:]
    return text, "", ""
