"""Which entries of records and messages are honoured, and which are refused by name.

Honoured beside messages and media: `system`, and whether an assistant's turn is a target: `loss`
(ms-swift), `weight` (OpenAI), `label` (PaddleFormers; of a message, or of the record with a value
for each assistant turn) and `loss_scale` (ms-swift), each true or false, 1 or 0. Refused is what
would change what is learned and is not read here. Other entries of a record are extras; other
entries of a message or a part are refused, with the nearest name that there is.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from paddle_vl.data.bad_sample import BadSampleError

TARGET_KEYS = ("loss", "weight", "label", "loss_scale")
_MESSAGE_KEYS = ("role", "content", *TARGET_KEYS)
# Entries of a record that are read; what else it has is extra.
RECORD_KEYS = ("messages", "images", "videos", "system", "label")

_NO_TOOLS = (
    "cannot be used yet; remove the entry, or write calls and their results into the contents as "
    "text"
)
_NO_PREFERENCES = (
    "is for training by preferences, which there is not: keep the answer to learn as the "
    "assistant's message, and remove the entry"
)
_NO_THOUGHTS = (
    "is not rendered: write it into the content, as in <think>...</think>, where the model should "
    "learn it, or remove it"
)
_NO_SAMPLE_WEIGHT = (
    "of a whole record is not read: give 'loss' (true or false) to its assistant messages"
)
_TOOL_KEYS = ("tools", "functions", "tool_calls", "function_call", "tool_call_id")
_PREFERENCE_KEYS = ("chosen", "rejected", "positive_messages", "negative_messages")
_PREFERENCE_PREFIXES = ("rejected_", "chosen_")
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")

# What the entry is to be called, or why there is none.
_REFUSED_OF_RECORD = {
    **dict.fromkeys(_TOOL_KEYS, _NO_TOOLS),
    **dict.fromkeys(_PREFERENCE_KEYS, _NO_PREFERENCES),
    **dict.fromkeys(_THOUGHT_KEYS, _NO_THOUGHTS),
    **dict.fromkeys(("loss", "weight", "loss_scale", "loss_mask"), _NO_SAMPLE_WEIGHT),
    "objects": "cannot be used yet; remove the entry, and write boxes into the contents as text",
    "audios": "cannot be used yet; remove the entry",
    "audio": "cannot be used yet; remove the entry",
    "image": "is not read: write a list, 'images'",
    "video": "is not read: write a list, 'videos'",
}
_REFUSED_OF_MESSAGE = {
    **dict.fromkeys(_TOOL_KEYS, _NO_TOOLS),
    **dict.fromkeys(_PREFERENCE_KEYS, _NO_PREFERENCES),
    **dict.fromkeys(_THOUGHT_KEYS, _NO_THOUGHTS),
    "train": "is not read: write it as 'loss'",
    "training": "is not read: write it as 'loss'",
    "name": "is not rendered: write it into the content, or remove it",
    "from": "is not read: write 'role' (system, user or assistant) and 'content'",
    "value": "is not read: write it as 'content'",
    "images": "is not read: list all images of the record beside 'messages'",
    "videos": "is not read: list all videos of the record beside 'messages'",
}
# Tags that take their boxes from `objects` in ms-swift.
_BOX_TAGS = ("<bbox>", "<ref-object>")
_OTHER_ROLES = {
    "developer": "; write it as 'system'",
    **dict.fromkeys(
        ("tool", "tool_call", "tool_response", "function", "observation"),
        "; tools cannot be used yet: write calls into an assistant's message and results into a "
        "user's, as text",
    ),
}


def check_record_keys(record: Mapping[str, Any]) -> None:
    """Refuse entries of a record that change what is learned and are not read.

    Empty ones (null, an empty text, list or object) say nothing; tables that are written as JSON
    have them.

    Raises:
        BadSampleError: naming the entry and what to do.
    """
    for key, value in record.items():
        if not _is_empty(value) and (why := _refused(key, _REFUSED_OF_RECORD)):
            raise BadSampleError("unsupported", f"{key!r} {why}")


def check_message_keys(message: Mapping[str, Any], where: str) -> None:
    """Refuse entries of a message that are not read.

    Raises:
        BadSampleError: naming the entry, and what to do or the nearest entry that is read.
    """
    for key, value in message.items():
        if key in _MESSAGE_KEYS or _is_empty(value):
            continue
        if why := _refused(key, _REFUSED_OF_MESSAGE):
            raise BadSampleError("unsupported", f"{where} has {key!r}, which {why}")
        refuse_unknown(key, where, _MESSAGE_KEYS)


def refuse_unknown(key: Any, where: str, known: Collection[str]) -> NoReturn:
    """
    Raises:
        BadSampleError: an entry that nothing reads, with the nearest one.
    """
    nearest = difflib.get_close_matches(str(key)[:80], known, n=1)
    guess = f" (is {nearest[0]!r} meant?)" if nearest else ""
    raise BadSampleError(
        "unknown_key",
        f"{where} has {str(key)[:80]!r}{guess}, which nothing reads; its entries can be "
        f"{', '.join(known)}: rename or remove it",
    )


def role_remedy(role: Any) -> str:
    """What to do about a role that there is not; empty where nothing is known of it."""
    return _OTHER_ROLES.get(role, "") if isinstance(role, str) else ""


def check_box_tags(text: str, where: str) -> None:
    """Refuse tags of ms-swift that stand for boxes and names.

    Raises:
        BadSampleError: naming the tag.
    """
    for tag in _BOX_TAGS:
        if tag in text:
            raise BadSampleError(
                "unsupported",
                f"{where} has the tag {tag}, which takes its place from 'objects' elsewhere and "
                "would be learned as it stands here: write the coordinates or the name as text",
            )


def is_target(message: Mapping[str, Any], where: str, listed: bool | None) -> bool:
    """Whether a message is to be learned, by its own entries and the record's `label`.

    Args:
        listed: what the record's `label` says of it; None where it says nothing.

    Raises:
        BadSampleError: a value that is neither 0 nor 1, values that differ, or one that would make
            a target of another turn than an assistant's.
    """
    given = {} if listed is None else {"the record's 'label'": listed}
    for key in TARGET_KEYS:
        if message.get(key) is not None:
            given[repr(key)] = _truth(message[key], f"{where} has {key!r}")
    if len(set(given.values())) > 1:
        said = ", ".join(f"{name} {value}" for name, value in given.items())
        raise BadSampleError(
            "bad_target", f"{where} is told to be learned and not to be: {said}; give one of them"
        )
    is_assistant = message["role"] == "assistant"
    if not is_assistant and any(given.values()):
        raise BadSampleError(
            "bad_target",
            f"{where} has role {message['role']!r} and {', '.join(given)} true: only an "
            "assistant's message can be learned; remove it",
        )
    return is_assistant and all(given.values())


def listed_targets(record: Mapping[str, Any], roles: Sequence[Any]) -> list[bool | None]:
    """For each message what the record's `label` says of it.

    Raises:
        BadSampleError: it is not a list of 0 and 1, one for each assistant message.
    """
    label = record.get("label")
    if label is None:
        return [None] * len(roles)
    if not isinstance(label, list):
        raise BadSampleError(
            "bad_target",
            f"'label' is {str(label)[:80]!r}; of a record it is a list of 0 and 1, one for each "
            "assistant message: rename the entry if it means something else",
        )
    num_answers = sum(role == "assistant" for role in roles)
    if len(label) != num_answers:
        raise BadSampleError(
            "bad_target",
            f"'label' has {len(label)} values and there are {num_answers} assistant messages; one "
            "for each is needed",
        )
    values = iter([_truth(value, "the record has 'label' with") for value in label])
    return [next(values) if role == "assistant" else None for role in roles]


def _truth(value: Any, what: str) -> bool:
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise BadSampleError(
        "bad_target",
        f"{what} {str(value)[:80]!r}; true or false (1 or 0) is needed: a turn is learned or not, "
        "by no other weight",
    )


def _refused(key: Any, refused: Mapping[str, str]) -> str | None:
    if key in refused:
        return refused[key]
    is_preference = isinstance(key, str) and key.startswith(_PREFERENCE_PREFIXES)
    return _NO_PREFERENCES if is_preference else None


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict | tuple) and not value)
