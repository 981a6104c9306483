"""Models of ModelScope by plain requests: a listing, and one request for each file.

The cache is that of ModelScope's client; listings and parts are added beside the snapshots:

    models/org--name/snapshots/REVISION/...    the files
    models/org--name/listings/REVISION.json    the listing that they were checked against
    models/org--name/parts/SHA256              unfinished files; the next download goes on with them

A branch that has moved replaces the changed files of its snapshot, and removes those that are gone.
"""

import hashlib
import json
import logging
import os
import ssl
from collections.abc import Sequence
from fnmatch import fnmatch
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from time import sleep
from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen

from paddle_vl.files.hub_names import HubName
from paddle_vl.files.text_file import parse_json_object, read_json_object, write_text

logger = logging.getLogger(__name__)
_ENDPOINT = "https://www.modelscope.cn"
# The server cuts longer listings off and does not say so.
_LONGEST_LISTING = 3000
_ATTEMPTS, _TIMEOUT_S, _BLOCK = 5, 30, 1 << 20
_LISTING, _LATER = "a listing of ModelScope", "try again later"
# Not all of OSError, which a full disk raises too.
_BROKEN = (URLError, ConnectionError, TimeoutError, ssl.SSLError, HTTPException)


class _File(NamedTuple):
    size: int
    sha256: str


def cache_folder() -> Path:
    """The cache of ModelScope's client."""
    return Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser()


def fetched(
    name: HubName, allowed: Sequence[str], never: Sequence[str], *, is_offline: bool
) -> Path:
    """The folder in the cache, with all files that match `allowed` and not `never`.

    Raises:
        RuntimeError: it is a data set, there is no such model, revision or file, the hub cannot be
            reached, a file has not the listed hash, or the cache is incomplete.
    """
    if name.kind != "model":
        raise RuntimeError(
            f"{name}: data sets of ModelScope are not fetched here; download it, as by "
            f"`modelscope download --dataset {name.name} --local_dir FOLDER`, and give FOLDER"
        )
    revision = name.revision or "master"
    home = cache_folder() / "models" / name.name.replace("/", "--")
    folder, record = home / "snapshots" / revision, home / "listings" / f"{revision}.json"
    # Of each file its size, its hash, and whether the file was checked against them.
    stored = read_json_object(record, _LISTING) if record.is_file() else {}
    checked = {path: _File(*each[:2]) for path, each in stored.items() if each[2]}
    listing = {path: _File(*each[:2]) for path, each in stored.items()}
    listing = listing if is_offline else _listed(name, revision)
    chosen = {path for path in listing if any(fnmatch(path, each) for each in allowed)}
    chosen = {path for path in chosen if not any(fnmatch(path, each) for each in never)}
    known = {path for path in listing if checked.get(path) == listing[path]}

    def is_there(path: str) -> bool:
        file, (size, sha256) = folder / path, listing[path]
        has_size = file.is_file() and file.stat().st_size == size
        return has_size and (path in known or _sha256(file) == sha256)

    absent = sorted(path for path in chosen if not is_there(path))
    if is_offline and not absent and folder.is_dir():
        # Without a listing ModelScope's client has filled the folder.
        return folder
    if is_offline:
        raise RuntimeError(
            f"{name}: {', '.join(absent) or 'it'} is not in the cache ({folder}), and requests are "
            "turned off: download it first, as by `paddle-vl download`"
        )
    if not chosen:
        raise RuntimeError(f"{name} has no file {', '.join(allowed)}: choose another")
    for path in absent:
        logger.info("downloading %s of %s (%d MiB)", path, name, listing[path].size >> 20)
        query = urlencode({"Revision": revision, "FilePath": path})
        part = home / "parts" / listing[path].sha256
        _download(f"{_api(name)}?{query}", part, listing[path], f"{path} of {name}")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        part.replace(folder / path)
    for path in checked.keys() - listing.keys():
        (folder / path).unlink(missing_ok=True)
    record.parent.mkdir(parents=True, exist_ok=True)
    entries = {path: [*file, path in chosen | known] for path, file in listing.items()}
    write_text(record, json.dumps(entries, indent=1))
    return folder


def _api(name: HubName) -> str:
    endpoint = os.environ.get("MODELSCOPE_ENDPOINT") or _ENDPOINT
    return f"{endpoint.rstrip('/')}/api/v1/models/{quote(name.name)}/repo"


def _opened(address: str, start: int = 0) -> HTTPResponse:
    """The answer to a GET, of a file from a byte on."""
    request = Request(address, headers={"Range": f"bytes={start}-"} if start else {})
    if token := os.environ.get("MODELSCOPE_API_TOKEN"):
        # Not for the other hosts that requests for large files are redirected to.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
        request.add_unredirected_header("Cookie", f"m_session_id={token}")
    return urlopen(request, timeout=_TIMEOUT_S)


def _listed(name: HubName, revision: str) -> dict[str, _File]:
    address = f"{_api(name)}/files?" + urlencode({"Revision": revision, "Recursive": True})
    try:
        with _opened(address) as answer:
            content = answer.read()
    except _BROKEN as error:
        raise _explained(str(name), error) from error
    values = parse_json_object(content, Path(address), _LISTING, _LATER)
    try:
        entries = values["Data"]["Files"]
        files = [file for file in entries if file["Type"] == "blob"]
        listing = {file["Path"]: _File(int(file["Size"]), file["Sha256"]) for file in files}
        for path, file in listing.items():
            is_outside = path.startswith("/") or ".." in PurePosixPath(path).parts
            if is_outside or len(bytes.fromhex(file.sha256)) != 32:
                raise ValueError(f"the path {path!r:.80} or its hash {file.sha256!r:.80}")
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error!r}; it says {values.get('Message')!r:.200}"
        raise RuntimeError(f"{name}: the answer is not {_LISTING}: {reason}; {_LATER}") from error
    if len(entries) >= _LONGEST_LISTING:
        raise RuntimeError(
            f"{name} may have more than {_LONGEST_LISTING} files, which ModelScope does not list: "
            f"download it with its client, as by `modelscope download --model {name.name}`"
        )
    return listing


def _download(address: str, part: Path, file: _File, what: str) -> None:
    """Write the file to `part`, going on with the bytes that are there already."""
    part.parent.mkdir(parents=True, exist_ok=True)
    part.touch()
    failures, failure = 0, None
    # An empty file needs no request.
    while (start := part.stat().st_size) < file.size:
        if failures == _ATTEMPTS:
            raise _explained(f"{what} ends at byte {start} of {file.size}", failure)
        sleep(failures)
        try:
            # A server without ranges answers 200, with the whole file.
            with (
                _opened(address, start) as answer,
                part.open("ab" if answer.status == 206 else "wb") as stream,
            ):
                while stream.tell() <= file.size and (block := answer.read(_BLOCK)):
                    stream.write(block)
        except _BROKEN as error:
            if isinstance(error, HTTPError) and error.code < 500:
                raise _explained(what, error) from error
            failure = error
        failures = 0 if part.stat().st_size > start else failures + 1
    if _sha256(part) != file.sha256:
        part.unlink()
        raise RuntimeError(f"{what} has not the SHA-256 {file.sha256} of the listing: {_LATER}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _explained(what: str, error: Exception | None) -> RuntimeError:
    remedy = "check MODELSCOPE_ENDPOINT, or set PADDLE_VL_OFFLINE=1 for what is in the cache"
    if isinstance(error, HTTPError) and error.code in (401, 403):
        remedy = "access is restricted: ask for it on its page, and set MODELSCOPE_API_TOKEN"
    elif isinstance(error, HTTPError) and error.code == 404:
        remedy = "there is no such model or revision: check both (of a local folder: the path)"
    return RuntimeError(f"{what}: {remedy} ({error})")
