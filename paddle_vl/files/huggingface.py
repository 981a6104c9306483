"""Models and data sets of Hugging Face, through huggingface_hub (the extra `hub`).

The variables HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_TOKEN and HF_HUB_ETAG_TIMEOUT are read at every
call; huggingface_hub itself reads most of them once, when it is imported.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paddle_vl.files.hub_names import HubName

_CONNECTION = "is the machine online, and is HF_ENDPOINT right?"


def cache_folder() -> Path:
    """The cache that all users of huggingface_hub share."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(home, "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def fetched(
    name: HubName, allowed: Sequence[str], never: Sequence[str], *, is_offline: bool
) -> Path:
    """The folder in the cache, with all files that match `allowed` and not `never`.

    Raises:
        RuntimeError: huggingface_hub is missing; or there is no such model or revision, it is
            gated, it has no such file, the hub cannot be reached, or the cache is incomplete.
    """
    api = _api()
    with _explained(name, is_offline):
        folder = api.snapshot_download(
            name.name,
            repo_type=name.kind,
            revision=name.revision,
            cache_dir=cache_folder(),
            etag_timeout=float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 10),
            local_files_only=is_offline,
            allow_patterns=list(allowed),
            ignore_patterns=list(never),
        )
    if not os.path.isdir(folder):
        raise RuntimeError(f"{name} has no file {', '.join(allowed)}: choose another")
    return Path(folder)


def upload(folder: Path, name: HubName, private: bool, never: Sequence[str]) -> str:
    """Commit a folder to a model's repository; repository and branch are made where there is none.

    Args:
        private: whether the repository must be private.
        never: patterns of files that are left out.

    Returns:
        The address of the commit.

    Raises:
        RuntimeError: the repository is public against `private`, or as in `fetched`.
    """
    api = _api()
    with _explained(name):
        api.create_repo(name.name, private=private or None, exist_ok=True)
        if private and not api.model_info(name.name).private:
            raise RuntimeError(f"{name} is public already: make it private there, or leave it so")
        if name.revision is not None:
            api.create_branch(name.name, branch=name.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name.name,
            folder_path=folder,
            revision=name.revision,
            ignore_patterns=list(never),
        )
    return commit.commit_url


def _api() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise RuntimeError(
            "Hugging Face needs the package huggingface_hub, which is not installed: pip install "
            "'paddle-vl[hub]', or give a local folder"
        ) from error
    endpoint, token = (os.environ.get(each) or None for each in ("HF_ENDPOINT", "HF_TOKEN"))
    return huggingface_hub.HfApi(endpoint=endpoint, token=token)


@contextmanager
def _explained(name: HubName, is_offline: bool = False) -> Iterator[None]:
    """Say of the errors of huggingface_hub what to do; those of the disk pass unchanged."""
    from huggingface_hub import errors

    offline = "not all files are in the cache, and requests are turned off: download it first"
    # The first that fits: some are kinds of others.
    remedies: dict[type[Exception], str] = {
        errors.GatedRepoError: "access is restricted: ask for it on its page, and set HF_TOKEN",
        errors.RevisionNotFoundError: "there is no such revision: name a branch, tag or commit",
        errors.RepositoryNotFoundError: "there is none of that name, or it is private: check the "
        "name (of a local folder: the path), and set HF_TOKEN for a private one",
        errors.LocalEntryNotFoundError: offline if is_offline else _CONNECTION,
        errors.HfHubHTTPError: "the hub refused the request",
        errors.HTTPError: _CONNECTION,
        errors.FileMetadataError: _CONNECTION,
        errors.HFValidationError: "the hub has no such names",
    }
    try:
        yield
    except tuple(remedies) as error:
        remedy = next(text for kind, text in remedies.items() if isinstance(error, kind))
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise RuntimeError(f"{name}: {remedy} ({reason:.300})") from error
