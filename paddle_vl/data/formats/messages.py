"""Rows of `messages`, the form that the readers of all other formats give too.

    {"messages": [{"role": "user", "content": "<image>What is this?"},
                  {"role": "assistant", "content": "A cat."}], "images": ["cat.png"]}

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"},
                                               {"type": "text", "text": "What is this?"}]}, ...]}

In a string, `<image>` and `<video>` take the entries of `images` and `videos` in order; in content
parts text is literal. `loss` and `loss_scale` (ms-swift), `weight` (OpenAI) and `label`
(PaddleFormers; of a message, or of the row with one value per turn) make a turn a training target,
each true or false, 1 or 0. Anthropic's blocks of calls and answers are read as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from paddle_vl.data.formats import grounding, tool_calls
from paddle_vl.data.formats.canonical import (
    MEDIA,
    CanonicalRow,
    Draft,
    as_message,
    check_turns,
    joined_turns,
    json_text,
    texts_of,
)
from paddle_vl.data.formats.keys import (
    REASONING_KEYS,
    SYSTEM_KEYS,
    TARGET_KEYS,
    check_message_keys,
    check_part_keys,
    check_template_settings,
    extras_of,
    from_text,
    is_empty,
    list_of,
)
from paddle_vl.data.formats.media import fill_places, media_part, split_tags
from paddle_vl.data.formats.row_settings import RowSettings
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import brief

_ROLES = {
    **{role: role for role in ("system", "user", "assistant")},
    **dict.fromkeys(tool_calls.ANSWER_ROLES, "tool"),
    **dict.fromkeys(tool_calls.CALL_ROLES, "assistant"),
}
_PART_TYPES = {"image_url": "image", "video_url": "video"} | {
    kind: kind for kind in ("text", "image", "video", "tool_use", "tool_result")
}
# Of OpenAI's interfaces, and of other models.
_REFUSED_PARTS = (
    "audio", "input_audio", "audio_url", "refusal", "input_text", "input_image", "output_text",
)  # fmt: skip


def canonical_row(
    row: Mapping[str, Any], settings: RowSettings, format: str, needs_tags: bool = False
) -> CanonicalRow:
    """The canonical form of a row with `messages`.

    Args:
        row: without null values.
        format: name of the format that the row had.
        needs_tags: refuse media without a place, instead of putting them in front.

    Raises:
        BadSampleError: a key, a value or the order of the messages does not fit.
    """
    extras = extras_of(row)
    objects = grounding.read_objects(row.get("objects"))
    has_objects = objects is not None
    drafts = [
        draft
        for number, message in enumerate(list_of(row["messages"], "messages"), start=1)
        for draft in _drafts(message, f"message {number}", has_objects)
    ]
    _set_targets(drafts, row.get("label"), settings)
    drafts = _with_system(drafts, row, has_objects)
    fill_places(drafts, row, needs_tags)
    turns = joined_turns(drafts)
    if any(turn.role == "tool" for turn in turns):
        turns = tool_calls.with_ordered_answers(turns)
    canonical = CanonicalRow(
        [as_message(turn) for turn in turns],
        format,
        tool_calls.read_tools(row["tools"]) if row.get("tools") else [],
        _template_settings(row.get("chat_template_kwargs")),
        extras,
        settings.train_on_prompt,
    )
    check_turns(canonical, [turn.where for turn in turns])
    _check_tokens([*texts_of(canonical.to_dict()), *(objects.names if objects else ())], settings)
    if objects:
        grounding.write_boxes(canonical.messages, objects, settings)
    return canonical


def _drafts(message: Any, where: str, has_objects: bool) -> Iterator[Draft]:
    """The message; of Anthropic's also the answers of tools in it."""
    message, role = _checked(message, where)
    content = message.get("content", "")
    draft = Draft(role, [], where, _targets(message, role, where))
    if message["role"] in tool_calls.CALL_ROLES:
        thought, call = tool_calls.split_thought(content)
        draft.calls, draft.call_ids = tool_calls.read_calls(call, where)
        content = [{"type": "text", "text": thought}]
    elif role == "tool":
        draft.call_ids = [tool_calls.call_id(message.get("tool_call_id"), where)]
        draft.name = message.get("name") or None
        content = content if _has_parts(content) else json_text(content, where)
    if isinstance(content, str):
        draft.parts = split_tags(content, where, has_objects)
    elif isinstance(content, list | tuple):
        for part in content:
            if isinstance(part, Mapping) and part.get("type") == "tool_result" and role == "user":
                yield from [draft] if draft.parts else []
                yield _answer(part, where)
                draft = Draft(role, [], where)
            else:
                _add_part(draft, part, where)
        if content and not draft.parts and role == "user":
            return
    else:
        raise BadSampleError(
            "missing_key",
            f"{where} has content of type {type(content).__name__}; a string or list is needed",
        )
    if not is_empty(message.get("tool_calls")):
        _add_calls(draft, message["tool_calls"])
    draft.reasoning = _reasoning(message, draft)
    kinds = [part["type"] for part in draft.parts if part["type"] in MEDIA]
    if role == "assistant" and kinds:
        raise BadSampleError(
            "tag_count",
            f"{where} has role 'assistant' and a part of type {kinds[0]} (or an <{kinds[0]}> tag); "
            "the model answers in text only: move it to a user or system message",
        )
    yield draft


def _checked(message: Any, where: str) -> tuple[dict[str, Any], str]:
    """A message without null values, and its canonical role."""
    if not isinstance(message, Mapping):
        raise BadSampleError(
            "missing_key", f"{where} is a {type(message).__name__}; a JSON object is needed"
        )
    message = {key: value for key, value in message.items() if value is not None}
    for key in ("role", "content"):
        may_lack = key == "content" and not is_empty(message.get("tool_calls"))
        if key not in message and not may_lack:
            reason = f"{where} has no {key!r}; its keys are {sorted(map(str, message))}"
            raise BadSampleError("missing_key", f"{reason}: write it")
    name = message["role"]
    if not isinstance(name, str) or name not in _ROLES:
        raise BadSampleError(
            "unknown_role",
            f"{where} has role {brief(name)!r}; use one of system, user, assistant, tool"
            + ("; write it as 'system'" if name == "developer" else ""),
        )
    check_message_keys(message, _ROLES[name], where)
    return message, _ROLES[name]


def _has_parts(content: Any) -> bool:
    """Whether a tool's content is text or content parts, not another JSON value."""
    return isinstance(content, str) or (
        isinstance(content, list | tuple)
        and all(isinstance(part, Mapping) for part in content)
        and all(part.get("type") in (*_PART_TYPES, *_REFUSED_PARTS) for part in content)
    )


def _add_part(draft: Draft, part: Any, where: str) -> None:
    """Add a content part, or a block with a call, to the draft."""
    given = part.get("type") if isinstance(part, Mapping) else None
    kind = _PART_TYPES.get(given) if isinstance(given, str) else None
    if kind in MEDIA:
        check_part_keys(part, kind, where)
        return draft.parts.append(media_part(part, kind, where))
    if kind == "text" and isinstance(part.get("text"), str):
        check_part_keys(part, kind, where)
        return draft.parts.append({"type": "text", "text": part["text"]})
    if kind == "tool_use" and draft.role == "assistant":
        check_part_keys(part, kind, where)
        call = {"id": part.get("id"), "name": part.get("name"), "arguments": part.get("input")}
        return _add_calls(draft, call)
    raise BadSampleError(
        "unsupported" if given in _REFUSED_PARTS else "missing_key",
        f"{where} has the part {brief(part)}; use {{'type': 'text', 'text': ...}}, "
        "{'type': 'image', ...} or {'type': 'video', ...}",
    )


def _add_calls(draft: Draft, value: Any) -> None:
    calls, ids = tool_calls.read_calls(value, draft.where)
    draft.calls += calls
    draft.call_ids += ids


def _answer(block: Mapping[str, Any], where: str) -> Draft:
    """The message of a tool from Anthropic's block."""
    check_part_keys(block, "tool_result", where)
    if block.get("is_error"):
        reason = f"{where} has a tool_result with 'is_error', which no chat template renders"
        raise BadSampleError("unsupported", f"{reason}: write it into the content")
    content = block.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    answer = Draft("tool", [], where)
    answer.call_ids = [tool_calls.call_id(block.get("tool_use_id"), where)]
    for part in parts if isinstance(parts, list | tuple) else [parts]:
        _add_part(answer, part, where)
    return answer


def _reasoning(message: Mapping[str, Any], draft: Draft) -> str:
    given = {key: message[key] for key in REASONING_KEYS if not is_empty(message.get(key))}
    texts = list(given.values())
    if any(not isinstance(text, str) for text in texts):
        raise BadSampleError(
            "missing_key", f"{draft.where} has {', '.join(given)} that is no string: write its text"
        )
    has_thought = bool(texts) and "<think>" in draft.text
    if len(set(texts)) > 1 or has_thought:
        others = " and a <think> in its content" if has_thought else " with different texts"
        reason = f"{draft.where} has {', '.join(given)}{others}: keep one of them"
        raise BadSampleError("ambiguous", reason)
    return texts[0] if texts else ""


def _targets(message: Mapping[str, Any], role: str, where: str) -> dict[str, bool]:
    """What a message's own keys say about whether it is a training target."""
    keys = [key for key in TARGET_KEYS if key in message]
    given = {repr(key): _truth(message[key], f"{where} has {key!r}") for key in keys}
    if role != "assistant" and any(given.values()):
        raise BadSampleError(
            "bad_target",
            f"{where} has role {message['role']!r} and {', '.join(given)} true: only an "
            "assistant's message can be a training target; remove it",
        )
    return given


def _set_targets(drafts: Sequence[Draft], label: Any, settings: RowSettings) -> None:
    """Add what the row's `label` and the run say about targets.

    Raises:
        BadSampleError: `label` is no list of 0 and 1, one for each turn of the assistant, or it or
            the keys of a message contradict each other.
    """
    is_turn = [(is_answer, list(each)) for is_answer, each in groupby(drafts, _is_answer)]
    turns = [each for is_answer, each in is_turn if is_answer]
    if not is_empty(label):
        for targets, value in zip(_labelled(turns, label), label, strict=True):
            for draft in targets:
                truth = _truth(value, "the record has 'label' with")
                draft.targets = {"the record's 'label'": truth, **draft.targets}
    for draft in drafts:
        if len(set(draft.targets.values())) > 1:
            said = ", ".join(f"{name} {value}" for name, value in draft.targets.items())
            raise BadSampleError(
                "bad_target", f"{draft.where} has contradicting keys: {said}; keep one of them"
            )
    for turn in turns[:-1] if settings.mask_history else ():
        for draft in turn:
            draft.targets["mask_history"] = False


def _is_answer(draft: Draft) -> bool:
    return draft.role == "assistant"


def _labelled(turns: Sequence[list[Draft]], label: Any) -> list[list[Draft]]:
    """The drafts for each value of `label`: of a turn, or of a single message of one."""
    if not isinstance(label, list | tuple):
        raise BadSampleError(
            "bad_target",
            f"'label' is {brief(label)!r}; of a record it must be a list of 0 and 1, one for each "
            "assistant message: rename the key if it means something else",
        )
    written = [[draft for draft in turn if draft.text or draft.calls] for turn in turns]
    by_turn = [turn for turn, own in zip(turns, written, strict=True) if own]
    by_message = [[draft] for own in written for draft in own]
    for found in (by_turn, by_message):
        if len(found) == len(label):
            return found
    raise BadSampleError(
        "bad_target",
        f"'label' has {len(label)} values for {len(by_message)} assistant messages; give one for "
        "each that is not empty",
    )


def _truth(value: Any, what: str) -> bool:
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise BadSampleError(
        "bad_target",
        f"{what} {brief(value)!r}; true or false (1 or 0) is needed: other weights are not "
        "supported",
    )


def _with_system(drafts: list[Draft], row: Mapping[str, Any], has_objects: bool) -> list[Draft]:
    """The drafts, with the row's `system` text as first message."""
    given = {key: row[key] for key in SYSTEM_KEYS if not is_empty(row.get(key))}
    for key, text in given.items():
        if not isinstance(text, str):
            raise BadSampleError(
                "missing_key", f"{key!r} is of type {type(text).__name__}; a string is needed"
            )
        system = Draft("system", split_tags(text, repr(key), has_objects), repr(key))
        if drafts[0].role != "system":
            drafts = [system, *drafts]
        elif drafts[0].parts != system.parts:
            other = drafts[0].where if drafts[0].where in given else "a system message"
            raise BadSampleError(
                "two_systems",
                f"the record has {key!r} and {other} with another text: keep one of them",
            )
    return drafts


def _template_settings(value: Any) -> dict[str, Any]:
    settings = {} if is_empty(value) else from_text(value)
    if not isinstance(settings, Mapping):
        reason = f"'chat_template_kwargs' is {brief(value)!r}; an object is needed"
        raise BadSampleError("missing_key", reason)
    check_template_settings(settings)
    return {key: each for key, each in settings.items() if each is not None}


def _check_tokens(texts: Sequence[str], settings: RowSettings) -> None:
    """Refuse names of control tokens in the row's texts.

    Raises:
        BadSampleError: with the names.
    """
    whole = "\n".join(texts)
    if forged := sorted(token for token in settings.forbidden_tokens if token in whole):
        raise BadSampleError(
            "special_token",
            f"the text contains the special token(s) {', '.join(forged)}, which would act as "
            "control tokens; remove or rewrite them (<image> and <video> place images and videos; "
            "data.special_tokens: [box, object_ref] allows those of boxes)",
        )
