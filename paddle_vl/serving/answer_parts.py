"""The text of an answer to what clients get: reasoning, content and calls of tools, as it comes.

Calls are read in both forms that Qwen's templates ask for, inside of `<tool_call>`: a JSON object,
and `<function=NAME>` with `<parameter=NAME>` (Qwen3.5), whose values are plain texts that the
tool's schema gives their types. What vLLM's parsers of both forms (0.33) read within `<tool_call>`
is read alike, but a call that is broken, or short of a parameter, stays text.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paddle_vl.data.formats.keys import from_text
from paddle_vl.data.formats.tool_schemas import property_schema, types_of
from paddle_vl.data.jsonl import check_unicode, parse_value
from paddle_vl.generation.text_pieces import Decode, TextStream

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
# Of several in a row; values may have tags.
_A_FUNCTION = re.compile(
    r"\s*(?:<tool_call>\s*)?<function=([^>\n]+)>(.*?)</function>\s*"
    r"(?=(?:<tool_call>\s*)?<function=|\Z)",
    re.DOTALL,
)
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
        while not self.is_stopped:
            first = _end_of_function(text) if self._stage == "call" else 0
            before, mark, rest = _split(text, self._marks(), first)
            if is_last and not mark:
                before, rest = before + rest, ""
            if self._stage != "call":
                self._add_text(parts, before, is_end=is_last and not mark)
                self._turn(mark)
                text = rest
                if not mark:
                    break
            elif mark or is_last:
                calls = None if mark == THINK_END else read_calls(before, self._tools or {})
                self._add_calls(parts, calls)
                text = rest if calls else before + mark + rest
            else:
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

    def _add_calls(self, parts: Parts, calls: list[tuple[str, str]] | None) -> None:
        """Complete calls, which end reasoning; of broken ones the mark is text."""
        self._stage = self._stage_before
        self._add_text(parts, "" if calls else CALL, is_end=calls is not None)
        if calls is None:
            return
        parts.calls += calls if self._several else calls[: not self.has_calls]
        self.has_calls, self._is_unclosed = True, self._is_unclosed or self._stage == "reasoning"
        self._stage = "content"
        self._drop_space()


def read_calls(body: str, tools: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    """Names and arguments as JSON of the text in a `<tool_call>`; None if a call is broken.

    Args:
        tools: the schemas of the arguments by the tools' names.
    """
    try:
        if body.lstrip().startswith(_FUNCTION):
            return [_checked(*each) for each in _functions(body, tools)]
        call = parse_value(body)
        return [_checked(call["name"], from_text(call["arguments"]))]
    except (ValueError, LookupError, TypeError):
        return None


def _checked(name: Any, arguments: Any) -> tuple[str, str]:
    """A call; a ValueError if it is none."""
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise ValueError("a name and an object are needed")
    text = json.dumps(arguments, ensure_ascii=False)
    check_unicode(name + text)
    return name, text


def _end_of_function(text: str) -> int:
    """Where the end of a call may stand, of which no mark within a function is one."""
    if not text.lstrip().startswith(_FUNCTION):
        return 0
    at = text.find(_FUNCTION_END)
    return len(text) if at < 0 else at


def _functions(text: str, tools: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and arguments of functions; a ValueError for what is none."""
    at = 0
    while at < len(text):
        if (found := _A_FUNCTION.match(text, at)) is None:
            raise ValueError("a function does not end")
        name, at = found[1].strip(), found.end()
        yield name, _parameters(found[2], tools.get(name))


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
    # 1.0 is an integer of JSON Schema; where texts are allowed it stays one, as in vLLM.
    if "integer" in types and "string" not in types:
        with suppress(ValueError):
            return _integer(text)
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


def _null(text: str) -> None:
    # Qwen3.5's template writes None, True and False as Python does.
    if text != "None" and text.lower() != "null":
        raise ValueError("it is no null")


_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_READERS: dict[str, Callable[[str], Any]] = {
    "null": _null,
    "integer": int,
    "number": _number,
    "boolean": lambda text: _BOOLEANS[text.strip().lower()],
    "object": lambda text: _parsed(text, dict),
    "array": lambda text: _parsed(text, list),
}


def _split(text: str, marks: Sequence[str], begin: int = 0) -> tuple[str, str, str]:
    """The text before the mark from `begin` on that ends first, it and the text after it; without
    one, the text that is certain, "" and the end that may begin a mark."""
    found = [(at + len(mark), at, mark) for mark in marks if (at := text.find(mark, begin)) >= 0]
    if found:
        _, at, mark = min(found)
        return text[:at], mark, text[at + len(mark) :]
    most = max((len(mark) - 1 for mark in marks), default=0)
    for length in range(min(most, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length], "", text[-length:]
    return text, "", ""
