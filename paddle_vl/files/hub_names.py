"""Names of models and data sets on a hub.

    Qwen/Qwen3-VL-2B-Instruct         on the hub that PADDLE_VL_HUB names (default huggingface)
    Qwen/Qwen3-VL-2B-Instruct@v1.0    a branch, tag or commit
    hf://org/name   ms://org/name     on Hugging Face, on ModelScope; also hf::org/name
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
_NAME = re.compile(
    r"(?P<name>[a-z0-9][\w.-]*/[a-z0-9][\w.-]*)(@(?P<revision>[a-z0-9][\w./-]*))?", re.I | re.ASCII
)
_SNAPSHOT = re.compile(r"/(models|datasets)(?:--|/)([^/]+?)--([^/]+)/snapshots/(.+)")


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
        ValueError: a hub's prefix without a name, an unknown hub, or two different revisions.
    """
    prefix = _PREFIX.match(text)
    found = _NAME.fullmatch(text[prefix.end() :] if prefix else text)
    if prefix and (found is None or ".." in text):
        raise ValueError(f"{text!r:.200} names nothing on a hub: write {prefix['hub']}://org/name")
    if found is None or ".." in text:
        return None
    if not prefix and (Path(text).exists() or Path(text.partition("/")[0]).is_dir()):
        return None
    chosen: Any = (
        _PREFIXES[prefix["hub"].lower()]
        if prefix
        else hub or os.environ.get(HUB_VARIABLE, "huggingface")
    )
    if chosen not in get_args(Hub):
        named = "hub" if hub else HUB_VARIABLE
        raise ValueError(f"{named} is {chosen!r:.80}: use one of {', '.join(get_args(Hub))}")
    if prefix and hub not in (None, chosen):
        raise ValueError(f"{text} is on {chosen}, but hub is {hub}: leave one of them out")
    if prefix and prefix["dataset"]:
        kind = "dataset"
    if None not in (revision, found["revision"]) and revision != found["revision"]:
        raise ValueError(f"{text} has another revision than {revision!r:.80}: leave one out")
    return HubName(chosen, kind, found["name"], revision or found["revision"])


def origins(settings: Mapping[str, str | None]) -> dict[str, dict[str, str]]:
    """What folders in the cache of a hub are, for the record of a run.

    Args:
        settings: folders by the names of their settings.

    Returns:
        For each setting with such a folder its `name` and `revision`; of Hugging Face the commit.
    """
    found = {key: _SNAPSHOT.search(Path(path).as_posix()) for key, path in settings.items() if path}
    return {
        key: {"name": f"{match[2]}/{match[3]}", "revision": match[4]}
        for key, match in found.items()
        if match is not None
    }


def is_on(variable: str) -> bool:
    """Whether a variable of the environment is set to 1, on, yes or true."""
    return os.environ.get(variable, "").lower() in ("1", "on", "yes", "true")
