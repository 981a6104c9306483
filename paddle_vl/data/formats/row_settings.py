"""What a run or a source sets about its rows, and the renaming of columns and tags."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paddle_vl.data.formats.keys import LIST_KEYS, is_empty, list_of
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import brief

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
        image_size: width and height in pixels of an image, upright, from its source.
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
    image_size: Callable[[Any], tuple[int, int]] | None = None

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
