"""TRL's rows of a prompt and a completion, both lists of messages; the completion is learned.

{"prompt": [{"role": "user", "content": "Colour?"}],
 "completion": [{"role": "assistant", "content": "Red."}]}
"""

from collections.abc import Mapping
from typing import Any

from paddle_vl.data.formats.keys import TARGET_KEYS, list_of
from paddle_vl.data.formats.tool_calls import CALL_ROLES
from paddle_vl.data.jsonl import BadSampleError


def read_prompt_completion(row: dict[str, Any]) -> dict[str, Any]:
    """The row as one of `messages`; the assistant's messages of the prompt are no targets.

    Args:
        row: without null values.

    Raises:
        BadSampleError: no lists of messages, a target in the prompt, or questions in the
            completion.
    """
    prompt, completion = (list_of(row.get(key), key) for key in ("prompt", "completion"))
    asked = [_role(message) for message in completion]
    if "user" in asked or "system" in asked:
        raise BadSampleError(
            "bad_order",
            "the completion has a message of the user or a system message, which would be learned: "
            "move the messages before the answer into the prompt",
        )
    messages = [_shown(message) for message in prompt] + completion
    rest = {key: value for key, value in row.items() if key not in ("prompt", "completion")}
    return {"messages": messages, **rest}


def _shown(message: Any) -> Any:
    """A message of the prompt, with `loss` false if it is the assistant's."""
    if _role(message) not in ("assistant", *CALL_ROLES):
        return message
    if any(message.get(key) for key in TARGET_KEYS):
        reason = "a message of the prompt is a training target by its keys"
        raise BadSampleError("bad_target", f"{reason}: move it into the completion")
    return {**message, "loss": False}


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None
