"""Models of a hub by plain requests: a listing, and one request for each file.

The cache is that of the hub's own client, or beside it:

    models/org--name/snapshots/REVISION/...    the files
    models/org--name/listings/REVISION.json    the listing that they were checked against
    models/org--name/parts/DIGEST              unfinished files; the next download goes on with them

A branch that has moved replaces the changed files of its snapshot, and removes those that are gone.
"""

import hashlib
import json
import logging
import os
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from time import sleep
from typing import Any, ClassVar, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from paddle_vl.files.hub_names import HubName
from paddle_vl.files.text_file import parse_json_object, read_json_object, write_text

logger = logging.getLogger(__name__)
_ATTEMPTS, _TIMEOUT_S, _BLOCK = 5, 30, 1 << 20
_LATER = "try again later"
# Not all of OSError, which a full disk raises too.
_BROKEN = (URLError, ConnectionError, TimeoutError, ssl.SSLError, HTTPException)


class ListedFile(NamedTuple):
    """A file of a listing.

    Attributes:
        size: in bytes.
        digest: of the hub's kind, in hexadecimal digits.
    """

    size: int
    digest: str


class PlainHub(ABC):
    """What differs between hubs.

    Attributes:
        title: of the hub, in messages.
        endpoint_variable, endpoint: the variable with a mirror's address, and the hub's own.
        cache_variable, cache: the variable with the folder of models, and the default.
        token_variable: the variable with a token.
        digest_name, digest_bytes: of the digests in its listings.
        data_set_hint: the command of its own client that downloads a data set.
    """

    title: ClassVar[str]
    endpoint_variable: ClassVar[str]
    endpoint: ClassVar[str]
    cache_variable: ClassVar[str]
    cache: ClassVar[str]
    token_variable: ClassVar[str]
    digest_name: ClassVar[str]
    digest_bytes: ClassVar[int]
    data_set_hint: ClassVar[str]

    def cache_folder(self) -> Path:
        """Where models are kept."""
        return Path(os.environ.get(self.cache_variable) or self.cache).expanduser()

    @abstractmethod
    def token_headers(self, token: str) -> Mapping[str, str]:
        """The headers that carry a token."""

    @abstractmethod
    def listed(
        self,
        name: HubName,
        revision: str,
        is_needed: Callable[[str], bool],
        known: Mapping[str, ListedFile],
    ) -> dict[str, ListedFile]:
        """All files of a revision by path.

        Args:
            is_needed: whether the file of a path is; sizes of others need not be right.
            known: files in the cache that were checked.

        Raises:
            RuntimeError: see `fetched`.
        """

    @abstractmethod
    def address(self, name: HubName, revision: str, path: str) -> str:
        """Where the content of a file is."""

    @abstractmethod
    def digest_fits(self, path: Path, digest: str) -> bool:
        """Whether a file has a digest of the listing."""

    def fetched(
        self, name: HubName, allowed: Sequence[str], never: Sequence[str], *, is_offline: bool
    ) -> Path:
        """The folder in the cache, with all files that match `allowed` and not `never`.

        Raises:
            RuntimeError: it is a data set, there is no such model, revision or file, the hub cannot
                be reached, a file has not the listed digest, or the cache is incomplete.
        """
        if name.kind != "model":
            raise RuntimeError(
                f"{name}: data sets of {self.title} are not fetched here; download it, as by "
                f"`{self.data_set_hint.format(name.name)}`, and give FOLDER"
            )
        revision = name.revision or "master"
        home = self.cache_folder() / "models" / name.name.replace("/", "--")
        folder, record = home / "snapshots" / revision, home / "listings" / f"{revision}.json"
        # Of each file its size, its digest, and whether the file was checked against them.
        stored = read_json_object(record, self._listing) if record.is_file() else {}
        checked = {path: ListedFile(*each[:2]) for path, each in stored.items() if each[2]}
        listing = {path: ListedFile(*each[:2]) for path, each in stored.items()}

        def is_needed(path: str) -> bool:
            is_allowed, is_never = (any(fnmatch(path, p) for p in of) for of in (allowed, never))
            return is_allowed and not is_never

        if not is_offline:
            listing = self.listed(name, revision, is_needed, checked)
        chosen = {path for path in listing if is_needed(path)}
        known = {path for path in listing if checked.get(path) == listing[path]}

        def is_there(path: str) -> bool:
            file, (size, digest) = folder / path, listing[path]
            has_size = file.is_file() and file.stat().st_size == size
            return has_size and (path in known or self.digest_fits(file, digest))

        absent = sorted(path for path in chosen if not is_there(path))
        if is_offline and not absent and folder.is_dir():
            # Without a listing the hub's own client has filled the folder.
            return folder
        if is_offline:
            raise RuntimeError(
                f"{name}: {', '.join(absent) or 'it'} is not in the cache ({folder}), and requests "
                "are turned off: download it first, as by `paddle-vl download`"
            )
        if not chosen:
            raise RuntimeError(f"{name} has no file {', '.join(allowed)}: choose another")
        for path in absent:
            logger.info("downloading %s of %s (%d MiB)", path, name, listing[path].size >> 20)
            part = home / "parts" / listing[path].digest
            address = self.address(name, revision, path)
            self._download(address, part, listing[path], f"{path} of {name}")
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            part.replace(folder / path)
        for path in checked.keys() - listing.keys():
            (folder / path).unlink(missing_ok=True)
        record.parent.mkdir(parents=True, exist_ok=True)
        entries = {path: [*file, path in chosen | known] for path, file in listing.items()}
        write_text(record, json.dumps(entries, indent=1))
        return folder

    @property
    def root(self) -> str:
        """The address of the hub, or of its mirror."""
        return (os.environ.get(self.endpoint_variable) or self.endpoint).rstrip("/")

    @contextmanager
    def answer(self, name: HubName, address: str) -> Iterator[dict[str, Any]]:
        """The JSON object that a GET answers. Faults of reading it in the block become errors.

        Raises:
            RuntimeError: there is none, or it is not as expected; says what to do.
        """
        try:
            with self._opened(address) as answer:
                content = answer.read()
        except _BROKEN as error:
            raise self._explained(str(name), error) from error
        values = parse_json_object(content, Path(address), self._listing, _LATER)
        try:
            yield values
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            told = values.get("message", values.get("Message"))
            reason = f"{error!r}; it says {told!r:.200}"
            raise RuntimeError(
                f"{name}: the answer is not {self._listing}: {reason}; {_LATER}"
            ) from error

    def check_file(self, path: str, digest: str) -> None:
        """Raise a ValueError for a path that leads elsewhere, or what is no digest."""
        is_outside = path.startswith("/") or ".." in PurePosixPath(path).parts
        if is_outside or len(bytes.fromhex(digest)) != self.digest_bytes:
            raise ValueError(f"the path {path!r:.80} or its hash {digest!r:.80}")

    @property
    def _listing(self) -> str:
        return f"a listing of {self.title}"

    def _opened(self, address: str, start: int = 0) -> HTTPResponse:
        """The answer to a GET, of a file from a byte on."""
        request = Request(address, headers={"Range": f"bytes={start}-"} if start else {})
        if token := os.environ.get(self.token_variable):
            # Not for the other hosts that requests for large files are redirected to.
            for header, value in self.token_headers(token).items():
                request.add_unredirected_header(header, value)
        return build_opener(_Redirects).open(request, timeout=_TIMEOUT_S)

    def _download(self, address: str, part: Path, file: ListedFile, what: str) -> None:
        """Write the file to `part`, going on with the bytes that are there already."""
        part.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        failures, failure = 0, None
        # An empty file needs no request.
        while (start := part.stat().st_size) < file.size:
            if failures == _ATTEMPTS:
                raise self._explained(f"{what} ends at byte {start} of {file.size}", failure)
            sleep(failures)
            try:
                # A server without ranges answers 200, with the whole file.
                with (
                    self._opened(address, start) as answer,
                    part.open("ab" if answer.status == 206 else "wb") as stream,
                ):
                    while stream.tell() <= file.size and (block := answer.read(_BLOCK)):
                        stream.write(block)
            except _BROKEN as error:
                if isinstance(error, HTTPError) and error.code < 500:
                    raise self._explained(what, error) from error
                failure = error
            failures = 0 if part.stat().st_size > start else failures + 1
        if part.stat().st_size != file.size or not self.digest_fits(part, file.digest):
            part.unlink()
            told = f"{self.digest_name} {file.digest}"
            raise RuntimeError(f"{what} has not the {told} of the listing: {_LATER}")

    def _explained(self, what: str, error: Exception | None) -> RuntimeError:
        variable = self.endpoint_variable
        remedy = f"check {variable}, or set PADDLE_VL_OFFLINE=1 for what is in the cache"
        if isinstance(error, HTTPError) and error.code in (401, 403):
            remedy = f"access is restricted: ask for it on its page, and set {self.token_variable}"
        elif isinstance(error, HTTPError) and error.code == 404:
            remedy = "there is no such model or revision: check both (of a local folder: the path)"
        return RuntimeError(f"{what}: {remedy} ({error})")


class _Redirects(HTTPRedirectHandler):
    """Sends what is not for other hosts again to the same one."""

    def redirect_request(self, req: Request, *others: Any, **named: Any) -> Request | None:
        new = super().redirect_request(req, *others, **named)
        if new is not None and urlsplit(new.full_url)[:2] == urlsplit(req.full_url)[:2]:
            for header, value in req.unredirected_hdrs.items():
                new.add_unredirected_header(header, value)
        return new


def digested(path: Path, *digests: Any) -> None:
    """Add the content of a file to digests of `hashlib`."""
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            for digest in digests:
                digest.update(block)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    digested(path, digest)
    return digest.hexdigest()
