"""Models and data sets of hubs as local folders, downloaded when they are first asked for."""

import os
from collections.abc import Sequence
from pathlib import Path

from paddle_vl.files import huggingface
from paddle_vl.files.aistudio import AIStudio
from paddle_vl.files.hub_names import Kind, hub_name
from paddle_vl.files.modelscope import ModelScope
from paddle_vl.files.text_file import locked

# Variables that forbid requests.
_OFFLINE = {
    "huggingface": ("PADDLE_VL_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
    "modelscope": ("PADDLE_VL_OFFLINE",),
    "aistudio": ("PADDLE_VL_OFFLINE",),
}
_CLIENTS = {"huggingface": huggingface, "modelscope": ModelScope(), "aistudio": AIStudio()}
# Patterns of the files that are fetched, and of those that never are: pickles and code.
FILES: dict[Kind, tuple[Sequence[str], Sequence[str]]] = {
    "model": (
        "*.json *.safetensors *.jinja additional_chat_templates/* tokenizer.model merges.txt "
        "vocab.*".split(),
        "*.bin *.pt *.pth *.py".split(),
    ),
    # The .bin of a data set are token files.
    "dataset": (["*"], "*.pt *.pth *.pkl *.pickle *.py".split()),
}


def local_folder(
    name_or_path: str | os.PathLike,
    *,
    revision: str | None = None,
    hub: str | None = None,
    kind: Kind = "model",
    patterns: Sequence[str] | None = None,
) -> Path:
    """The folder of a model or data set: an existing path as it is; of a name on a hub its folder
    in the hub's cache, into which missing files are downloaded.

    Processes that ask for the same name at once wait for the first. Files of the folder may be
    links, and must not be changed.

    Args:
        patterns: of the needed files, as `*.json`; default: `FILES`. Code and pickles never are.

    Raises:
        RuntimeError: there is neither such a path nor such a name, or it cannot be downloaded.
        ValueError: see `hub_name`; or a revision of a path.
    """
    text = os.fspath(name_or_path)
    if text.strip() and Path(text).exists():
        if revision is not None:
            raise ValueError(f"{text} is a local path, which has no revision {revision!r:.80}")
        return Path(text)
    name = hub_name(text, revision=revision, hub=hub, kind=kind)
    if name is None:
        raise RuntimeError(
            f"{text!r:.200} is neither a path here (paths are relative to the current directory, "
            f"{Path.cwd()}) nor the name of a {kind} on a hub: check the path, or write org/name, "
            "hf://org/name, ms://org/name or aistudio://org/name"
        )
    client = _CLIENTS[name.hub]
    allowed, never = FILES[name.kind]
    if any(map(_is_on, _OFFLINE[name.hub])):
        return client.fetched(name, patterns or allowed, never, is_offline=True)
    locks = client.cache_folder() / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with locked(locks / f"paddle_vl--{name.kind}--{name.name.replace('/', '--')}"):
        return client.fetched(name, patterns or allowed, never, is_offline=False)


def path_or_download(text: str) -> Path:
    """`local_folder` of a model's name; a path stays as it is, whether it exists or not."""
    return Path(text) if hub_name(text) is None else local_folder(text)


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "on", "yes", "true")
