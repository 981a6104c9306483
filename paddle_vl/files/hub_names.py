"""Names of models and data sets on a hub.

    Qwen/Qwen3-VL-2B-Instruct         on the hub that PADDLE_VL_HUB names (default huggingface)
    Qwen/Qwen3-VL-2B-Instruct@v1.0    a branch, tag or commit
    hf://org/name   ms://org/name     on Hugging Face, on ModelScope; also hf::org/name
    aistudio://org/name               on AI Studio
    hf://datasets/org/name            a data set

An existing path is never a name, and neither is a text like `./model`, or `runs/model` beside a
folder `runs`: a mistyped path is not looked up on a hub.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Hub = Literal["huggingface", "modelscope", "aistudio"]
Kind = Literal["model", "dataset"]
HUB_VARIABLE = "PADDLE_VL_HUB"
_PREFIXES: dict[str, Hub] = {"hf": "huggingface", "ms": "modelscope", "aistudio": "aistudio"}
_PREFIX = re.compile(rf"(?P<hub>{'|'.join(_PREFIXES)})(://|::)(?P<dataset>datasets/)?", re.I)
_NAME = re.compile(r"[a-z0-9][\w.-]*/[a-z0-9][\w.-]*", re.I | re.ASCII)
_REVISION = re.compile(r"[a-z0-9][\w./-]*", re.I | re.ASCII)
_SNAPSHOT = re.compile(r"/(?:models|datasets)(?:--|/)([^/]+?)--([^/]+)/snapshots/(.+)")


@dataclass(frozen=True)
class HubName:
    """A model or data set on a hub.

    Attributes:
        name: `org/name`.
        revision: branch, tag or commit; None for the hub's default.
    """

    hub: Hub
    kind: Kind
    name: str
    revision: str | None = None

    def __str__(self) -> str:
        at = "" if self.revision is None else f"@{self.revision}"
        return f"{self.kind} {self.name}{at} on {self.hub}"


def hub_name(
    text: str, *, revision: str | None = None, hub: str | None = None, kind: Kind = "model"
) -> HubName | None:
    """The model or data set that a text names; None for a path, whether it exists or not.

    Args:
        hub: the hub of names without a prefix; default: the environment's PADDLE_VL_HUB.

    Raises:
        ValueError: a hub's prefix without a name, an unknown hub, or two hubs or revisions.
    """
    prefix = _PREFIX.match(text)
    name, _, own_revision = text[prefix.end() if prefix else 0 :].partition("@")
    is_name = _NAME.fullmatch(name) is not None
    if prefix is None:
        if not is_name or Path(text).exists() or Path(text.partition("/")[0]).is_dir():
            return None
        chosen: Any = hub or os.environ.get(HUB_VARIABLE, "huggingface")
    else:
        chosen = _PREFIXES[prefix["hub"].lower()]
        kind = "dataset" if prefix["dataset"] else kind
    if not is_name or hub not in (None, chosen):
        raise ValueError(f"{text!r:.200} names nothing on {hub or chosen}: write hf://org/name")
    if chosen not in get_args(Hub):
        named = "hub" if hub else HUB_VARIABLE
        raise ValueError(f"{named} is {chosen!r:.80}: use one of {', '.join(get_args(Hub))}")
    if own_revision and revision:
        raise ValueError(f"{text} has a revision, and {revision!r:.80} is given: leave one out")
    revision = own_revision or revision
    if revision and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ValueError(f"{revision!r:.80} is no revision: name a branch, tag or commit")
    return HubName(chosen, kind, name, revision)


def origins(settings: Mapping[str, str | None]) -> dict[str, str]:
    """Of settings that name a folder in a hub's cache, name and revision: `org/name@COMMIT`."""
    found = {key: _SNAPSHOT.search(Path(path).as_posix()) for key, path in settings.items() if path}
    return {key: f"{each[1]}/{each[2]}@{each[3]}" for key, each in found.items() if each}
