"""Keys of rows, messages and content parts: which are read, which are refused and why, and what a
run or a source sets about them.

Keys of other formats that would change the training targets or the prompt are refused. Further keys
of a row are extras and named once per file, unless they are known to describe the row; further keys
of a message or a content part are refused with the nearest known key. Null and empty values ask for
nothing: tables have every key in every row. Lists and objects may be written as text.
"""

import ast
import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paddle_vl.data.jsonl import BadSampleError, parse_value
from paddle_vl.data.media_file import brief

LIST_KEYS = ("messages", "conversations", "conversation")
TARGET_KEYS = ("loss", "weight", "label", "loss_scale")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
SYSTEM_KEYS = ("system", "system_prompt")
# Names of a question and of an answer (ms-swift), compared without case.
QUERY_KEYS = ("query", "prompt", "input", "instruction", "question", "problem")
RESPONSE_KEYS = (
    "response", "answer", "output", "targets", "target", "answer_key", "answers", "solution",
    "text", "completion", "content",
)  # fmt: skip
# Keys of any row; those of its turns differ by format.
ROW_KEYS = (
    *SYSTEM_KEYS, "images", "image", "videos", "video", "objects", "tools", "label",
    "chat_template_kwargs",
)  # fmt: skip
# Extras of which nothing is said.
_DESCRIPTIONS = (
    "id", "uid", "uuid", "index", "task", "source", "dataset", "category", "channel", "language",
    "metadata", "meta", "url", "score", "references",
)  # fmt: skip
_MOST_NAMED = 10
# Keys of every message, in the order in which messages list them.
_KEYS_OF_ALL = dict.fromkeys(("role", "content", *TARGET_KEYS))
_KEYS_OF_ROLE = {
    "assistant": ("tool_calls", *REASONING_KEYS),
    "tool": ("tool_call_id", "name"),
}

# Keys of a content part that hold its source, as HF, OpenAI and Anthropic spell them.
SOURCE_KEYS = {
    "image": ("image", "path", "url", "image_url", "source"),
    "video": ("video", "path", "url", "video_url"),
}
_PART_KEYS = {
    "text": ("type", "text"),
    "image": ("type", *SOURCE_KEYS["image"]),
    "video": ("type", *SOURCE_KEYS["video"]),
    "tool_use": ("type", "id", "name", "input"),
    "tool_result": ("type", "tool_use_id", "content", "is_error"),
}
# Settings of a single image or video in other formats. Ignoring them would train on another size
# or number of frames than intended, so they are refused.
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
_FRAMES = (
    "fps", "nframes", "num_frames", "min_frames", "max_frames", "total_pixels", "video_start",
    "video_end", "sample_fps", "raw_fps",
)  # fmt: skip
_FOR_ALL = "cannot be set for one row; set {} for all"
_REFUSED_OF_PART = {
    "image": dict.fromkeys(_SIZES, _FOR_ALL.format("data.max_pixels or data.min_pixels")),
    "video": dict.fromkeys(
        (*_FRAMES, *_SIZES),
        _FOR_ALL.format("data.video_fps, data.video_max_frames or data.video_max_pixels"),
    ),
}
_REFUSED_OF_TEMPLATE = {
    **_REFUSED_OF_PART["video"], **_REFUSED_OF_PART["image"],
    **dict.fromkeys(
        ("messages", "tools", "documents", "add_generation_prompt"),
        "the run gives to the template: remove it",
    ),
}  # fmt: skip

_NO_PREFERENCES = (
    "is for preference training (train.objective: preference), ranking or classification: for "
    "fine-tuning keep the answer to learn as the assistant's message, and remove the key"
)
_PREFERENCE_KEYS = (
    "chosen", "rejected", "positive_messages", "negative_messages", "kto_tag", "margin",
    "teacher_prompt",
)  # fmt: skip
_PREFERENCE_PREFIXES = ("rejected_", "chosen_")

# Refused keys, with the name to use instead or the reason.
_REFUSED_OF_ROW = {
    **dict.fromkeys(
        ("loss", "weight", "loss_scale", "loss_mask", "mask"),
        "is read of messages alone: give 'loss' (true or false) to the assistant's",
    ),
    **dict.fromkeys(("audios", "audio"), "is not supported; remove the key"),
    **dict.fromkeys(
        ("tool_calls", "function_call", "tool_call_id"),
        "is not read: write calls as 'tool_calls' of an assistant's message",
    ),
    **dict.fromkeys(
        REASONING_KEYS, "is read of messages alone: give it to the assistant's message"
    ),
    "functions": "is not read: name the definitions of tools 'tools'",
    "enable_thinking": "is not read: the chat template's settings stand in 'chat_template_kwargs'",
}
_REFUSED_OF_MESSAGE = {
    "function_call": "is not read: write it as 'tool_calls'",
    **dict.fromkeys(
        ("functions", "tools"),
        "is not read: name the record's tools 'tools', beside 'messages'",
    ),
    **dict.fromkeys(("train", "training"), "is not read: use 'loss'"),
    "name": "is not rendered: write it into the content, or remove it",
    "from": "is not read: use 'role' (system, user or assistant) and 'content'",
    "value": "is not read: use 'content'",
    **dict.fromkeys(
        ("images", "videos"), "is not read: list those of the whole record beside 'messages'"
    ),
}
# Tokens that a text may contain if `special_tokens` names them.
BOX_TOKENS = {
    "box": ("<|box_start|>", "<|box_end|>"),
    "object_ref": ("<|object_ref_start|>", "<|object_ref_end|>"),
}
_LLAMA_FACTORY_ROLES = {
    "user_tag": "human", "assistant_tag": "gpt", "observation_tag": "observation",
    "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip
HIDDEN = "_"


@dataclass(frozen=True)
class RowSettings:
    """Settings of rows.

    Attributes:
        boxes: how boxes and names of `objects` are written.
        clip_boxes: move boxes that are partly outside of their image to its edge.
        special_tokens: tokens that texts may contain: `box`, `object_ref`.
        control_tokens: names of the tokenizer's special tokens, which texts must not contain.
        columns: keys of the file's rows and the keys that they stand for; `_` hides a key.
        only_columns: whether keys that `columns` does not name are hidden, as in LLaMA-Factory.
        tags: LLaMA-Factory's names of keys and roles of a message (`role_tag`, `user_tag`, ...).
        mask_history: learn the last turn only.
        train_on_prompt: learn all text.
        nulls_are_values: nulls in calls and tools are meant, and not filled in by a table.
        image_size: width and height in pixels of an image, upright, from its source.
        tasks: prompts of the model's tasks, by the name that a row's `task` may have.
        checks: what answers are checked for, see `paddle_vl.data.formats.tasks`.
        html_tables: whether answers that are tables in HTML become OTSL.
    """

    boxes: Literal["json", "markers"] = "json"
    clip_boxes: bool = False
    special_tokens: Collection[str] = ()
    control_tokens: Collection[str] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    only_columns: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)
    mask_history: bool = False
    train_on_prompt: bool = False
    nulls_are_values: bool = False
    image_size: Callable[[Any], tuple[int, int]] | None = None
    tasks: Mapping[str, str] = field(default_factory=dict)
    checks: Collection[str] = ()
    html_tables: Literal["keep", "otsl"] = "keep"

    @property
    def have_tasks(self) -> bool:
        """Whether a row's task, or what its answers must be, matters."""
        return bool(self.tasks or self.checks) or self.html_tables != "keep"

    def __post_init__(self) -> None:
        if self.boxes not in ("json", "markers"):
            raise ValueError(f"boxes is {self.boxes!r}; use 'json' or 'markers'")
        if unknown := set(self.special_tokens) - BOX_TOKENS.keys():
            raise ValueError(f"special_tokens has {sorted(unknown)}; use {', '.join(BOX_TOKENS)}")
        known = {"role_tag", "content_tag", *_LLAMA_FACTORY_ROLES}
        if unknown := self.tags.keys() - known:
            raise ValueError(f"tags has {sorted(unknown)}; use {', '.join(sorted(known))}")
        if self.tags and not {"role_tag", "content_tag"} <= self.tags.keys():
            raise ValueError("tags replaces all defaults: name role_tag and content_tag too")
        if self.mask_history and self.train_on_prompt:
            raise ValueError("mask_history and train_on_prompt exclude each other: set one")
        targets = [key for key in self.columns.values() if key != HIDDEN]
        if len(set(targets)) < len(targets):
            raise ValueError(f"columns gives several columns one name: {dict(self.columns)}")

    @property
    def forbidden_tokens(self) -> set[str]:
        """Tokens that a text must not contain."""
        allowed = {token for name in self.special_tokens for token in BOX_TOKENS[name]}
        return {
            *self.control_tokens,
            *(each for pair in BOX_TOKENS.values() for each in pair),
        } - allowed


def renamed(row: Mapping[str, Any], settings: RowSettings) -> dict[str, Any]:
    """The row with the keys and roles of its format, without null values.

    Raises:
        BadSampleError: a renamed key is there already, or a role is not among the tags.
    """
    found: dict[str, Any] = {}
    for column, value in row.items():
        key = settings.columns.get(column, HIDDEN if settings.only_columns else column)
        if key == HIDDEN or value is None:
            continue
        if key in found:
            raise BadSampleError(
                "ambiguous",
                f"the record has the key {key!r} and another that 'columns' gives this name: hide "
                f"one of them ({{{key!r}: '_'}})",
            )
        found[key] = value
    for key in LIST_KEYS if settings.tags else ():
        if not is_empty(found.get(key)):
            messages = enumerate(list_of(found[key], key), start=1)
            found[key] = [_untagged(message, n, settings.tags) for n, message in messages]
    return found


def _untagged(message: Any, number: int, tags: Mapping[str, str]) -> Any:
    """A message in ShareGPT's default names."""
    if not isinstance(message, Mapping):
        return message
    roles = {tags[tag]: role for tag, role in _LLAMA_FACTORY_ROLES.items() if tag in tags}
    role = message.get(tags["role_tag"])
    if not isinstance(role, str) or role not in roles:
        raise BadSampleError(
            "unknown_role",
            f"message {number} has the role {brief(role)!r}, which 'tags' does not name; it names "
            f"{sorted(roles)}: add it, or correct the row",
        )
    own = (tags["role_tag"], tags["content_tag"])
    others = {key: value for key, value in message.items() if key not in own}
    return {"from": roles[role], "value": message.get(tags["content_tag"]), **others}


def check_preference(row: Mapping[str, Any]) -> None:
    """Refuse a row for preference training, ranking or classification.

    Raises:
        BadSampleError: with the key.
    """
    for key, value in row.items():
        if _is_preference(key) and not is_empty(value):
            raise BadSampleError("preference", f"{key!r} {_NO_PREFERENCES}")
    if not is_empty(row.get("response")) and not is_empty(row.get("sort")):
        raise BadSampleError("preference", f"'response' with 'sort' {_NO_PREFERENCES}")
    if isinstance(label := row.get("label"), bool | int | float):
        raise BadSampleError(
            "preference",
            f"'label' is {brief(label)!r}; of a record it must be a list of 0 and 1, one for each "
            "assistant message (one value is for preference training, train.objective: preference, "
            "or classification): rename the key if it means something else",
        )


def extras_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a row in the form of `messages` that are not read.

    Raises:
        BadSampleError: a key would change the targets or the prompt; says what to do.
    """
    extras = {key: row[key] for key in row if key not in ("messages", *ROW_KEYS)}
    check_keys(extras, "the record", None, _REFUSED_OF_ROW)
    return extras


def check_message_keys(message: Mapping[str, Any], role: str, where: str) -> None:
    """Refuse keys of a message that are not read.

    Args:
        role: the canonical one.

    Raises:
        BadSampleError: with the key, and what to do or the nearest known key.
    """
    if message.keys() <= _KEYS_OF_ALL.keys():
        return
    known = (*_KEYS_OF_ALL, *_KEYS_OF_ROLE.get(role, ()))
    for other, keys in _KEYS_OF_ROLE.items():
        for key in [key for key in keys if key not in {*known, *_REFUSED_OF_MESSAGE}]:
            if not is_empty(message.get(key)):
                reason = f"{where} has {key!r}, which only a message of role {other!r} can have"
                raise BadSampleError("unknown_key", f"{reason}: move or remove it")
    refused = {key: _NO_PREFERENCES for key in message if _is_preference(key)}
    check_keys(message, where, known, refused | _REFUSED_OF_MESSAGE)


def check_part_keys(part: Mapping[str, Any], kind: str, where: str) -> None:
    """Refuse keys of a content part that are not read.

    Raises:
        BadSampleError: with the key, and the setting for all images or videos or the nearest key.
    """
    where = f"a part of type {kind} of {where}"
    check_keys(part, where, _PART_KEYS[kind], _REFUSED_OF_PART.get(kind, {}))


def check_template_settings(settings: Mapping[str, Any]) -> None:
    """Refuse variables of a chat template that are settings of the processor or the run's own.

    Raises:
        BadSampleError: with the key and what to do.
    """
    check_keys(settings, "'chat_template_kwargs'", None, _REFUSED_OF_TEMPLATE)


def check_keys(
    given: Mapping[str, Any],
    where: str,
    known: Collection[str] | None,
    refused: Mapping[str, str] = {},
) -> None:
    """Refuse keys that are not read; tables give an object the keys of all others, empty.

    Args:
        known: None for any that is not refused.
        refused: why, and what to do, by key.

    Raises:
        BadSampleError: with the key, and the reason or the nearest known key.
    """
    for key, value in given.items():
        if is_empty(value) or (known is not None and key in known):
            continue
        if key in refused:
            raise BadSampleError("unsupported", f"{where} has {key!r}, which {refused[key]}")
        if known is not None:
            raise BadSampleError(
                "unknown_key",
                f"{where} has the unknown key {str(key)[:80]!r}{_guess(key, known)}; it can have "
                f"{', '.join(known)}: rename or remove the key",
            )


def wrong(what: str, value: Any, needed: str, kind: str = "missing_key") -> BadSampleError:
    """The error of a value that is another than is needed."""
    return BadSampleError(kind, f"{what} is {brief(value)!r}; {needed}")


def unread_keys(extras: Mapping[str, Any]) -> list[str]:
    """Keys of a row's extras that may have been meant for something."""
    return [
        str(key)
        for key, value in extras.items()
        if key not in _DESCRIPTIONS and not is_empty(value)
    ]


def unread_note(keys: Collection[str]) -> str | None:
    """What to say about keys that are not read, with the nearest keys that are; None for no key."""
    if not keys:
        return None
    known = ("messages", *ROW_KEYS)
    named = [f"{key[:80]!r}{_guess(key, known)}" for key in list(keys)[:_MOST_NAMED]]
    more = f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
    return (
        f"records have the key(s) {', '.join(named)}{more}, which are not read (of a record "
        f"{', '.join(known)} are): rename what should be"
    )


def from_text(value: Any, *, literal: bool = False) -> Any:
    """The value of a text that holds JSON; any other value, and other text, as it is.

    Args:
        literal: whether the text may also be a Python literal.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_value(value)
    except ValueError:
        pass
    try:
        return ast.literal_eval(value.strip()) if literal else value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return value


def list_of(value: Any, name: str) -> list[Any]:
    """A list that may be written as text.

    Raises:
        BadSampleError: it is no list, or an empty one.
    """
    found = from_text(value, literal=True)
    if not isinstance(found, list | tuple) or not found:
        reason = "must be a list with at least one message (or its JSON text); it is"
        raise BadSampleError("missing_key", f"{name!r} {reason} {brief(value)!r}")
    return list(found)


def is_empty(value: Any) -> bool:
    """Whether a value asks for nothing: null, or an empty text, list or object."""
    return value is None or (isinstance(value, str | list | dict | tuple) and not value)


def _is_preference(key: Any) -> bool:
    return isinstance(key, str) and (
        key in _PREFERENCE_KEYS or key.startswith(_PREFERENCE_PREFIXES)
    )


def _guess(key: Any, known: Collection[str]) -> str:
    nearest = difflib.get_close_matches(str(key)[:80], known, n=1)
    return f" (is {nearest[0]!r} meant?)" if nearest else ""
