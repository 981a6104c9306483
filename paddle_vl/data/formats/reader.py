"""A row of any format to its canonical form, a conversation whose images and videos can be opened.

`dialects` makes the row one of `messages`:

    {"messages": [{"role": "user", "content": "<image>What is this?"},
                  {"role": "assistant", "content": "A cat."}], "images": ["cat.png"]}

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"},
                                               {"type": "text", "text": "What is this?"}]}, ...]}

Each message becomes a draft, and the drafts the turns of the canonical form. In a string, `<image>`
and `<video>` take the entries of `images` and `videos` in order; in content parts text is literal.
Anthropic's blocks of calls and answers are read as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paddle_vl.data.formats import grounding, tool_calls
from paddle_vl.data.formats.canonical import (
    MEDIA,
    Conversation,
    Draft,
    as_message,
    check_turns,
    fill_places,
    joined_turns,
    json_text,
    media_part,
    read_targets,
    set_targets,
    split_tags,
    texts_of,
)
from paddle_vl.data.formats.dialects import FORMATS, fitting_format
from paddle_vl.data.formats.keys import (
    REASONING_KEYS,
    SYSTEM_KEYS,
    RowSettings,
    check_message_keys,
    check_part_keys,
    check_template_settings,
    extras_of,
    from_text,
    is_empty,
    list_of,
    renamed,
    wrong,
)
from paddle_vl.data.formats.tasks import check_tasks, with_question
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import MediaFolder, brief, media_source, upright_size
from paddle_vl.data.video_reader import FrameFiles, VideoFrames

_DEFAULT = RowSettings()
# Sources in memory instead of file names.
_IN_MEMORY = (Image.Image, np.ndarray, VideoFrames, FrameFiles)
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


def to_canonical(
    row: Mapping[str, Any], settings: RowSettings = _DEFAULT, *, format: str | None = None
) -> Conversation:
    """The canonical form of a row; whether it has a target is for `Conversation.check_targets`.

    Args:
        row: JSON types, and for media also bytes and objects in memory.
        format: name from `FORMATS`, which every row of a source has; None recognises the row's own.

    Raises:
        BadSampleError: the row has another format, or a value that is unusable or means something
            that is not supported; says the format, what is wrong and what to do.
        ValueError: there is no such format.
    """
    name = format
    try:
        if isinstance(row, Mapping):
            row = renamed(row, settings)
            if settings.tasks:
                row = with_question(row, settings.tasks)
        name = fitting_format(row, format)
        found = _canonical_row(FORMATS[name].read(row), settings, name)
        if settings.have_tasks:
            check_tasks(found, settings)
        return found
    except BadSampleError as error:
        read_as = f"a row of format {name}: " if name else ""
        raise BadSampleError(error.kind, read_as + error.reason) from error


@dataclass(frozen=True)
class RowReader:
    """Reads the rows of one source. It can be pickled.

    Attributes:
        settings: of the rows.
        format: see `dialects.FORMATS`; None recognises each row's.
        allow_outside: whether paths may lead outside of the folder of the data file.
        remote: makes a file of an http(s) address; None refuses addresses.
    """

    settings: RowSettings = field(default_factory=RowSettings)
    format: str | None = None
    allow_outside: bool = True
    remote: Any = None

    def __call__(self, row: Mapping[str, Any], directory: Path | None = None) -> Conversation:
        """Read a row.

        Args:
            row: sources of images and videos may also be PIL images, arrays, `VideoFrames`,
                `FrameFiles` or the bytes of an image file.
            directory: folder that relative paths start from; None leaves paths as they are.

        Raises:
            BadSampleError: the row does not fit its format, or a path is unusable.
        """
        folder, settings = self.opening(directory)
        return self.opened(to_canonical(row, settings, format=self.format), folder)

    def opening(self, directory: Path | None) -> tuple[MediaFolder, RowSettings]:
        """The folder of a row's files, and the settings to read it with."""
        folder = MediaFolder(directory, self.allow_outside, self.remote)

        def size(source: Any) -> tuple[int, int]:
            return upright_size(_opened("image", source, folder))

        # `replace` would check the settings again for every row.
        settings = copy(self.settings)
        object.__setattr__(settings, "image_size", size)
        return folder, settings

    def opened(self, row: Conversation, folder: MediaFolder) -> Conversation:
        """The conversation with sources that can be opened."""
        return row.with_sources(lambda kind, source: _opened(kind, source, folder))


def parse_record(
    record: Mapping[str, Any], directory: Path | None = None, **settings: Any
) -> Conversation:
    """The conversation of a record of any format; see `RowReader`, and `RowSettings`."""
    return RowReader(RowSettings(**settings))(record, directory)


def _opened(kind: str, source: Any, folder: MediaFolder) -> Any:
    """A source that can be opened: a path, bytes, or an object in memory."""
    if isinstance(source, _IN_MEMORY):
        return source
    if isinstance(source, list):
        return FrameFiles(tuple(_opened("image", frame, folder) for frame in source))
    return media_source(source, kind, f"{kind} source", folder)


def _canonical_row(row: Mapping[str, Any], settings: RowSettings, format: str) -> Conversation:
    """The canonical form of a row with `messages` that had a format, without null values."""
    extras = extras_of(row)
    objects = grounding.read_objects(row.get("objects"))
    has_objects = objects is not None
    tools = tool_calls.read_tools(row.get("tools"), settings.nulls_are_values)
    schemas = {each["function"]["name"]: each["function"].get("parameters") for each in tools}
    of_calls = None if settings.nulls_are_values else schemas
    drafts = [
        draft
        for number, message in enumerate(list_of(row["messages"], "messages"), start=1)
        for draft in _drafts(message, f"message {number}", has_objects, of_calls)
    ]
    set_targets(drafts, row.get("label"), settings)
    drafts = _with_system(drafts, row, has_objects)
    fill_places(drafts, row, FORMATS[format].needs_tags)
    turns = joined_turns(drafts)
    if any(turn.role == "tool" for turn in turns):
        turns = tool_calls.with_ordered_answers(turns)
    canonical = Conversation(
        [as_message(turn) for turn in turns],
        format,
        tools,
        _template_settings(row.get("chat_template_kwargs")),
        extras,
        settings.train_on_prompt,
    )
    places = [turn.where for turn in turns]
    check_turns(canonical, places)
    if any(turn.role == "tool" or turn.calls for turn in turns):
        tool_calls.check_calls(canonical, places)
    _check_tokens([*texts_of(canonical.to_dict()), *(objects.names if objects else ())], settings)
    if objects:
        grounding.write_boxes(canonical.messages, objects, settings)
    return canonical


def _drafts(
    message: Any, where: str, has_objects: bool, schemas: tool_calls.Schemas
) -> Iterator[Draft]:
    """The message; of Anthropic's also the answers of tools in it.

    Args:
        schemas: see `read_calls`.
    """
    message, role = _checked(message, where)
    content = message.get("content", "")
    draft = Draft(role, [], where, read_targets(message, role, where))
    if message["role"] in tool_calls.CALL_ROLES:
        thought, call = tool_calls.split_thought(content)
        draft.calls, draft.call_ids = tool_calls.read_calls(call, where, schemas)
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
                _add_part(draft, part, where, schemas)
        if content and not draft.parts and role == "user":
            return
    else:
        raise BadSampleError(
            "missing_key",
            f"{where} has content of type {type(content).__name__}; a string or list is needed",
        )
    if not is_empty(message.get("tool_calls")):
        _add_calls(draft, message["tool_calls"], schemas)
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


def _add_part(draft: Draft, part: Any, where: str, schemas: tool_calls.Schemas = None) -> None:
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
        return _add_calls(draft, call, schemas)
    raise BadSampleError(
        "unsupported" if given in _REFUSED_PARTS else "missing_key",
        f"{where} has the part {brief(part)}; use {{'type': 'text', 'text': ...}}, "
        "{'type': 'image', ...} or {'type': 'video', ...}",
    )


def _add_calls(draft: Draft, value: Any, schemas: tool_calls.Schemas) -> None:
    calls, ids = tool_calls.read_calls(value, draft.where, schemas)
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
        raise wrong("'chat_template_kwargs'", value, "an object is needed")
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
