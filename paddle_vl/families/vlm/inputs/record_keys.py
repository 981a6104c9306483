"""Keys of records, messages and content parts: which are read, and which are refused and why.

Read beside messages and media: `system`, and the keys that make an assistant's turn a training
target: `loss` and `loss_scale` (ms-swift), `weight` (OpenAI), `label` (PaddleFormers; in a message,
or in the record with one value per assistant turn), each true or false, 1 or 0. Keys of other
formats that would change the training targets or the prompt are refused. Further keys of a record
are kept as extras and named once per file, unless they are known to describe the record; further
keys of a message or a content part are refused with the nearest known key.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import brief

TARGET_KEYS = ("loss", "weight", "label", "loss_scale")
_MESSAGE_KEYS = ("role", "content", *TARGET_KEYS)
# Keys of a record that are read; all others are extras.
RECORD_KEYS = ("messages", "images", "videos", "system", "label")
# Extras of which nothing is said.
_DESCRIPTIONS = (
    "id", "uid", "uuid", "index", "task", "source", "dataset", "category", "channel", "language",
    "metadata", "meta", "url", "score",
)  # fmt: skip
_MOST_NAMED = 10

# Keys of a content part that hold its source, as HF and OpenAI spell them.
SOURCE_KEYS = {
    "image": ("image", "path", "url", "image_url"),
    "video": ("video", "path", "url"),
}
_PART_KEYS = {kind: ("type", *keys) for kind, keys in SOURCE_KEYS.items()} | {
    "text": ("type", "text")
}
# Settings of a single image or video in other formats. Ignoring them would train on another size
# or number of frames than intended, so they are refused.
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
_PART_SETTINGS = {
    "image": _SIZES,
    "video": (
        "fps", "nframes", "num_frames", "min_frames", "max_frames", "total_pixels", "video_start",
        "video_end", *_SIZES,
    ),
}  # fmt: skip
_SETTINGS_FOR_ALL = {
    "image": "data.max_pixels or data.min_pixels",
    "video": "data.video_fps, data.video_max_frames or data.video_max_pixels",
}

_NO_TOOLS = (
    "is not supported; remove the key, or write calls and their results into the contents as text"
)
_NO_PREFERENCES = (
    "is for preference training (not supported): keep the answer to learn as the "
    "assistant's message, and remove the key"
)
_NO_THOUGHTS = (
    "is not rendered: write it into the content, as in <think>...</think>, if the model should "
    "learn it, or remove it"
)
_NO_SAMPLE_WEIGHT = "of a record is not read: give 'loss' (true or false) to its assistant messages"
_NO_TEMPLATE_ARGUMENTS = (
    "is not read: the chat template has no settings; write what the prompt should say into the "
    "messages, and remove the key"
)
_NO_OTHER_TURNS = (
    "beside 'messages' is not read: write its turns into 'messages', and remove the key"
)
_TOOL_KEYS = ("tools", "functions", "tool_calls", "function_call", "tool_call_id")
_PREFERENCE_KEYS = ("chosen", "rejected", "positive_messages", "negative_messages")
_PREFERENCE_PREFIXES = ("rejected_", "chosen_")
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")

# Refused keys, with the name to use instead or the reason.
_REFUSED_OF_RECORD = {
    **dict.fromkeys(_TOOL_KEYS, _NO_TOOLS),
    **dict.fromkeys(_PREFERENCE_KEYS, _NO_PREFERENCES),
    **dict.fromkeys(_THOUGHT_KEYS, _NO_THOUGHTS),
    **dict.fromkeys(("loss", "weight", "loss_scale", "loss_mask"), _NO_SAMPLE_WEIGHT),
    **dict.fromkeys(("enable_thinking", "chat_template_kwargs"), _NO_TEMPLATE_ARGUMENTS),
    **dict.fromkeys(("history", "query", "response"), _NO_OTHER_TURNS),
    "mask": _NO_SAMPLE_WEIGHT,
    "objects": "is not supported; remove the key, and write boxes into the contents as text",
    "audios": "is not supported; remove the key",
    "audio": "is not supported; remove the key",
    "image": "is not read: use a list, 'images'",
    "video": "is not read: use a list, 'videos'",
}
_REFUSED_OF_MESSAGE = {
    **dict.fromkeys(_TOOL_KEYS, _NO_TOOLS),
    **dict.fromkeys(_PREFERENCE_KEYS, _NO_PREFERENCES),
    **dict.fromkeys(_THOUGHT_KEYS, _NO_THOUGHTS),
    "train": "is not read: use 'loss'",
    "training": "is not read: use 'loss'",
    "name": "is not rendered: write it into the content, or remove it",
    "from": "is not read: use 'role' (system, user or assistant) and 'content'",
    "value": "is not read: use 'content'",
    "images": "is not read: list all images of the record beside 'messages'",
    "videos": "is not read: list all videos of the record beside 'messages'",
}
# Tags of ms-swift that stand for entries of `objects`.
_BOX_TAGS = ("<bbox>", "<ref-object>")
# What to do about a role of another format.
OTHER_ROLES = {
    "developer": "; write it as 'system'",
    **dict.fromkeys(
        ("tool", "tool_call", "tool_response", "function", "observation"),
        "; tools are not supported: write calls into an assistant's message and results into a "
        "user's, as text",
    ),
}


def check_record_keys(record: Mapping[str, Any]) -> None:
    """Refuse keys of a record that would change the targets or the prompt and are not read.

    Empty values (null, an empty string, list or object) are ignored; tables exported as JSON have
    them.

    Raises:
        BadSampleError: with the key and what to do.
    """
    for key, value in record.items():
        if not _is_empty(value) and (why := _refused(key, _REFUSED_OF_RECORD)):
            raise BadSampleError("unsupported", f"{key!r} {why}")


def unread_keys(extra: Mapping[str, Any]) -> list[str]:
    """Keys of a record's extras that may have been meant for something."""
    return [
        str(key)
        for key, value in extra.items()
        if key not in _DESCRIPTIONS and not _is_empty(value)
    ]


def unread_note(keys: Collection[str]) -> str | None:
    """What to say about keys that are not read, with the nearest keys that are; None for no key."""
    if not keys:
        return None
    named = [f"{key[:80]!r}{_guess(key, RECORD_KEYS)}" for key in list(keys)[:_MOST_NAMED]]
    more = f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
    return (
        f"records have the key(s) {', '.join(named)}{more}, which are not read (of a record "
        f"{', '.join(RECORD_KEYS)} are): rename what should be"
    )


def check_message_keys(message: Mapping[str, Any], where: str) -> None:
    """Refuse keys of a message that are not read.

    Raises:
        BadSampleError: with the key, and what to do or the nearest known key.
    """
    for key, value in message.items():
        if key in _MESSAGE_KEYS or _is_empty(value):
            continue
        if why := _refused(key, _REFUSED_OF_MESSAGE):
            raise BadSampleError("unsupported", f"{where} has {key!r}, which {why}")
        _refuse_unknown(key, where, _MESSAGE_KEYS)


def check_part_keys(part: Mapping[str, Any], kind: str, where: str) -> None:
    """Refuse keys of a content part that are not read.

    Raises:
        BadSampleError: with the key, and the setting for all images or videos or the nearest key.
    """
    ignored = [key for key in _PART_SETTINGS.get(kind, ()) if part.get(key) is not None]
    if ignored:
        raise BadSampleError(
            "unsupported",
            f"{where} has a {kind} part with {', '.join(ignored)}, which cannot be set for one "
            f"{kind}; set {_SETTINGS_FOR_ALL[kind]} for all",
        )
    for key, value in part.items():
        # Tables exported as JSON give every part the keys of all others as null.
        if key not in _PART_KEYS[kind] and value is not None:
            _refuse_unknown(key, f"a part of type {kind} of {where}", _PART_KEYS[kind])


def _refuse_unknown(key: Any, where: str, known: Collection[str]) -> NoReturn:
    """Raise a BadSampleError for an unknown key, with the nearest known one."""
    guess = _guess(key, known)
    raise BadSampleError(
        "unknown_key",
        f"{where} has the unknown key {str(key)[:80]!r}{guess}; it can have {', '.join(known)}: "
        "rename or remove the key",
    )


def _guess(key: Any, known: Collection[str]) -> str:
    nearest = difflib.get_close_matches(str(key)[:80], known, n=1)
    return f" (is {nearest[0]!r} meant?)" if nearest else ""


def check_box_tags(text: str, where: str) -> None:
    """Raise a BadSampleError for ms-swift's tags that stand for boxes and names."""
    for tag in _BOX_TAGS:
        if tag in text:
            raise BadSampleError(
                "unsupported",
                f"{where} has the tag {tag}, which ms-swift replaces by an entry of 'objects' and "
                "which would be learned literally here: write the coordinates or the name as text",
            )


def is_target(message: Mapping[str, Any], where: str, label: bool | None) -> bool:
    """Whether a message is a training target, by its own keys and the record's `label`.

    Args:
        label: the record's `label` for this message; None without.

    Raises:
        BadSampleError: a value other than 0 and 1, contradicting values, or a target with another
            role than "assistant".
    """
    given = {} if label is None else {"the record's 'label'": label}
    for key in TARGET_KEYS:
        if message.get(key) is not None:
            given[repr(key)] = _truth(message[key], f"{where} has {key!r}")
    if len(set(given.values())) > 1:
        said = ", ".join(f"{name} {value}" for name, value in given.items())
        raise BadSampleError(
            "bad_target", f"{where} has contradicting keys: {said}; keep one of them"
        )
    is_assistant = message["role"] == "assistant"
    if not is_assistant and any(given.values()):
        raise BadSampleError(
            "bad_target",
            f"{where} has role {message['role']!r} and {', '.join(given)} true: only an "
            "assistant's message can be a training target; remove it",
        )
    return is_assistant and all(given.values())


def listed_targets(record: Mapping[str, Any], roles: Sequence[Any]) -> list[bool | None]:
    """The record's `label` for each message; None for messages without.

    Raises:
        BadSampleError: `label` is not a list of 0 and 1, one for each assistant message.
    """
    label = record.get("label")
    if label is None:
        return [None] * len(roles)
    if not isinstance(label, list):
        raise BadSampleError(
            "bad_target",
            f"'label' is {brief(label)!r}; of a record it must be a list of 0 and 1, one for "
            "each assistant message: rename the key if it means something else",
        )
    num_answers = sum(role == "assistant" for role in roles)
    if len(label) != num_answers:
        raise BadSampleError(
            "bad_target",
            f"'label' has {len(label)} values for {num_answers} assistant messages; give one for "
            "each",
        )
    values = iter([_truth(value, "the record has 'label' with") for value in label])
    return [next(values) if role == "assistant" else None for role in roles]


def _truth(value: Any, what: str) -> bool:
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise BadSampleError(
        "bad_target",
        f"{what} {brief(value)!r}; true or false (1 or 0) is needed: other weights are not "
        "supported",
    )


def _refused(key: Any, refused: Mapping[str, str]) -> str | None:
    if key in refused:
        return refused[key]
    is_preference = isinstance(key, str) and key.startswith(_PREFERENCE_PREFIXES)
    return _NO_PREFERENCES if is_preference else None


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict | tuple) and not value)
