"""Tools in the spellings of OpenAI, HF, ms-swift, LLaMA-Factory, PaddleFormers and Anthropic.

Definitions become OpenAI's wrapped form, calls `tool_calls` of an assistant's message with their
arguments as an object, answers messages of role `tool` in the order of the calls.

Nulls that tables fill in are left out of objects; JSON texts are as their writers meant them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paddle_vl.data.formats.canonical import Conversation, Draft
from paddle_vl.data.formats.keys import check_keys, from_text, is_empty
from paddle_vl.data.formats.tool_schemas import schema_without_nulls, without_nulls
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import brief

# Roles of a message that is a call, and of one that is an answer.
CALL_ROLES = ("tool_call", "tool_calls", "function", "function_call", "function_calls")
ANSWER_ROLES = ("tool", "tool_response", "observation", "observations", "function_response")
_THOUGHT = re.compile(r"\s*(<think>.*?</think>)\s*", re.DOTALL)
# Keys of Anthropic's definitions, as OpenAI names them.
_ANTHROPIC = {"input_schema": "parameters"}

Schemas = Mapping[str, Any] | None


def read_tools(value: Any, nulls_are_values: bool = False) -> list[dict[str, Any]]:
    """The definitions of a row.

    Args:
        value: a list of definitions, wrapped or bare, or its JSON text; empty for none.

    Raises:
        BadSampleError: no list of definitions with different names.
    """
    tools = [] if is_empty(value) else from_text(value)
    if not isinstance(tools, list | tuple):
        raise _bad_tools(f"are {brief(value)!r}, no list of definitions and no JSON text of one")
    are_meant = nulls_are_values or isinstance(value, str)
    found = [_definition(tool, are_meant or isinstance(tool, str)) for tool in tools]
    names = [each["function"]["name"] for each in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise _bad_tools(f"have several definitions of {', '.join(twice)}")
    return found


def _definition(tool: Any, nulls_are_values: bool) -> dict[str, Any]:
    tool = from_text(tool)
    if not isinstance(tool, Mapping):
        raise _bad_tools(f"have {brief(tool)!r}, no object")
    outer = {key: value for key, value in tool.items() if value is not None}
    if (kind := outer.pop("type", "function")) != "function":
        raise _bad_tools(f"have one of type {brief(kind)!r}, not 'function'")
    function = outer.pop("function", None)
    function, outer = (outer, {}) if function is None else (function, outer)
    if not isinstance(function, Mapping) or not _is_name(function.get("name")):
        raise _bad_tools(f"have {brief(tool)} without a 'name'")
    function = {
        _ANTHROPIC.get(key, key): each for key, each in function.items() if each is not None
    }
    if not nulls_are_values:
        function = {key: schema_without_nulls(each, each) for key, each in function.items()}
    if "parameters" in function:
        function["parameters"] = from_text(function["parameters"])
        if not isinstance(function["parameters"], Mapping):
            raise _bad_tools(
                f"have {brief(function['name'])!r} with 'parameters' that are no object"
            )
    return {"type": "function", "function": function, **outer}


def _bad_tools(reason: str) -> BadSampleError:
    remedy = "write [{'type': 'function', 'function': {'name', 'description', 'parameters'}}, ...]"
    return BadSampleError("bad_tools", f"'tools' {reason}: {remedy}")


def read_calls(
    value: Any, where: str, schemas: Schemas
) -> tuple[list[dict[str, Any]], list[str | None]]:
    """The calls of a message and their ids; without arguments they have none.

    Args:
        value: one call or a list of calls, wrapped or bare, or the JSON text.
        schemas: of the arguments, by name; None where nulls are values.

    Raises:
        BadSampleError: a call without a name, or whose arguments are no object.
    """
    found = from_text(value)
    calls = [found] if isinstance(found, Mapping) else found
    if not isinstance(calls, list | tuple) or not calls:
        raise _bad_call(where, f"{brief(value)!r}, which is no JSON object and no list of objects")
    texts = [isinstance(value, str) or isinstance(call, str) for call in calls]
    pairs = zip(calls, texts, strict=True)
    read = [_call(from_text(call), where, None if text else schemas) for call, text in pairs]
    ids = [each for _, each in read if each is not None]
    if len(set(ids)) < len(ids):
        raise _bad_call(where, f"two calls with the same id among {brief(ids)}")
    return [call for call, _ in read], [each for _, each in read]


def _call(call: Any, where: str, schemas: Schemas) -> tuple[dict[str, Any], str | None]:
    if not isinstance(call, Mapping):
        raise _bad_call(where, f"{brief(call)!r}, which is no object")
    call = {key: value for key, value in call.items() if value is not None}
    if call.get("type", "function") != "function":
        raise _bad_call(where, f"of type {brief(call['type'])!r}, not 'function'")
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not _is_name(function.get("name")):
        raise _bad_call(where, f"{brief(call)} without a 'name'")
    function = {key: value for key, value in function.items() if value is not None}
    # OpenAI's client keeps the index in a stream, and adds what it makes of the arguments.
    outer, inner = ("type", "id", "index", "function"), ("name", "arguments", "parsed_arguments")
    known = (("call", call, outer), ("function", function, inner))
    for what, given, keys in known if "function" in call else (("call", call, outer + inner),):
        check_keys(given, f"a {what} of {where}", keys)
    name, given = function["name"], function.get("arguments", "")
    arguments = from_text(given)
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise _bad_call(where, f"of {brief(name)!r} with arguments {brief(arguments)!r}")
    if schemas is not None and arguments is given:
        arguments = without_nulls(arguments, schemas.get(name), schemas.get(name))
    wrapped = {"name": name, "arguments": dict(arguments)}
    return {"type": "function", "function": wrapped}, call_id(call.get("id"), where)


def call_id(value: Any, where: str) -> str | None:
    """The id of a call, also as its answer names it; None for an empty one.

    Raises:
        BadSampleError: it is no text.
    """
    if not isinstance(value, str | None):
        raise BadSampleError("bad_tool_call", f"{where} has the id {brief(value)}; write a text")
    return value or None


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _bad_call(where: str, reason: str) -> BadSampleError:
    remedy = "write {'name': ..., 'arguments': {...}}, with the arguments as a JSON object"
    return BadSampleError("bad_tool_call", f"{where} has a call {reason}: {remedy}")


def split_thought(value: Any) -> tuple[str, Any]:
    """The `<think>...</think>` in front of a call's JSON text, and the rest."""
    found = _THOUGHT.match(value) if isinstance(value, str) else None
    return (found[1], value[found.end() :]) if found else ("", value)


def with_ordered_answers(turns: Sequence[Draft]) -> list[Draft]:
    """The turns, with the answers of tools in the order of the calls.

    Raises:
        BadSampleError: an answer names a call or a tool that is not there.
    """
    ordered: list[Draft] = []
    calls = Draft("assistant", [], "")
    block: list[Draft] = []
    for turn in [*turns, None]:
        if turn is not None and turn.role == "tool":
            block.append(turn)
            continue
        ordered += _ordered(block, calls)
        if turn is not None:
            ordered.append(turn)
            calls, block = turn, []
    return ordered


def _ordered(answers: list[Draft], turn: Draft) -> list[Draft]:
    known = [each for each in turn.call_ids if each is not None]
    names = [call["function"]["name"] for call in turn.calls]
    given = [each for answer in answers for each in answer.call_ids if each is not None]
    if known and given:
        if len(given) < len(answers) or len({*given}) < len(given) or not {*given} <= {*known}:
            raise BadSampleError(
                "bad_tool_call",
                f"{answers[0].where} and the answers of tools behind it have the ids {brief(given)}"
                f", and the calls have {brief(known)}: give each answer the id of its own call",
            )
        answers = sorted(answers, key=lambda answer: turn.call_ids.index(answer.call_ids[0]))
        names = [names[turn.call_ids.index(answer.call_ids[0])] for answer in answers]
    for answer, name in zip(answers, names, strict=False):
        if answer.name not in (None, name):
            raise BadSampleError(
                "bad_tool_call",
                f"{answer.where} answers {brief(answer.name)!r}, and the call is one of {name!r}: "
                "give calls and answers ids, or write the answers in the order of the calls",
            )
    return answers


def check_calls(row: Conversation, places: Sequence[str]) -> None:
    """Check that every answer of a tool has a call, and every call a tool of the row.

    Args:
        places: of the messages, for the error.

    Raises:
        BadSampleError: an answer stands without a call before it, or a call names no tool.
    """
    names = {tool["function"]["name"] for tool in row.tools}
    open_calls = 0
    for message, where in zip(row.messages, places, strict=True):
        role, calls = message["role"], message.get("tool_calls", [])
        if role == "tool" and not open_calls:
            raise BadSampleError(
                "bad_order",
                f"{where} is a tool's answer without a call before it: put it behind the "
                "assistant's message with the call, or remove it",
            )
        open_calls = open_calls - 1 if role == "tool" else len(calls)
        for name in (call["function"]["name"] for call in calls):
            if names and name not in names:
                raise BadSampleError(
                    "bad_tool_call",
                    f"{where} calls {brief(name)!r}, which is not among the tools {sorted(names)}: "
                    "add its definition to 'tools', or correct the name",
                )
