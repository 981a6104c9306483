"""Images and videos at http(s) addresses, kept in a cache; and data URIs.

Rows are untrusted: an address must not reach what only this machine can, so names are resolved
here, all their addresses must be public, and the connection goes to a checked one; after every
redirect too. Proxies of the environment are not used, since they would resolve names themselves.
"""

import base64
import hashlib
import socket
import ssl
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from threading import Timer
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import shown
from paddle_vl.files.text_file import locked, replacing

_PORTS = {"http": 80, "https": 443}
_MOST_REDIRECTS, _BLOCK = 5, 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
# IPv6 addresses whose last four bytes are an IPv4 address.
_NAT64 = ip_network("64:ff9b::/96")
# Characters of addresses that are written as they are.
_KEPT = "/%:@!$&'()*+,;=~?[]"
_SAVE_IT = "save it as a file and write its path"


@dataclass(frozen=True)
class RemoteSettings:
    """What may be fetched.

    Attributes:
        allow: whether anything is fetched (data.allow_remote).
        max_bytes: of one file.
        timeout_s: for one file, from connecting to its last byte, redirects included.
        cache: folder of fetched files.
        allowed_hosts: names or addresses whose hosts need not be public, as of one's own store.
    """

    allow: bool = False
    max_bytes: int = 1 << 26
    timeout_s: float = 30.0
    cache: Path = Path("~/.cache/paddle_vl/remote")
    allowed_hosts: tuple[str, ...] = ()


def fetch(address: str, settings: RemoteSettings) -> Path:
    """The file in the cache with the content of an address, which is fetched once.

    Processes and threads that ask for the same address wait for the first; the file appears
    complete or not at all.

    Raises:
        BadSampleError: of kind `remote`: remote files are not allowed, the address or a redirect is
            of another scheme or not public, the server refuses, or a limit is passed.
        OSError: the cache cannot be written.
    """
    if not settings.allow:
        reason = f"{shown(address)!r} is a remote file: {_SAVE_IT}, or set data.allow_remote: true"
        raise BadSampleError("remote", reason)
    name = hashlib.sha256(address.encode()).hexdigest()
    file = settings.cache.expanduser() / name[:2] / name
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file):
            if not file.is_file():
                content = _downloaded(address, settings)
                with replacing(file) as partial:
                    partial.write_bytes(content)
    if (size := file.stat().st_size) > settings.max_bytes:
        raise _failed(address, f"it has {size} bytes, and the limit is {settings.max_bytes}")
    return file


def data_uri_bytes(text: str, max_bytes: int) -> bytes:
    """The content of a `data:` URI in base64. Its declared type is ignored: the content decides.

    Raises:
        BadSampleError: of kind `remote`: it is no such URI, or has more bytes.
    """
    head, comma, payload = text.partition(",")
    if not (comma and head.lower().startswith("data:") and head.lower().endswith(";base64")):
        reason = f"{shown(head)!r} is not data:TYPE;base64,CONTENT: {_SAVE_IT}"
        raise BadSampleError("remote", reason)
    if (size := len(payload) // 4 * 3 - payload[-2:].count("=")) > max_bytes:
        reason = f"the data URI has {size} bytes, and the limit is {max_bytes}: {_SAVE_IT}"
        raise BadSampleError("remote", reason)
    try:
        return base64.b64decode(payload, validate=True)
    except ValueError as error:
        reason = f"the data URI {shown(text)!r} is not base64 ({error}): {_SAVE_IT}"
        raise BadSampleError("remote", reason) from error


def _downloaded(address: str, settings: RemoteSettings) -> bytes:
    deadline = time.monotonic() + settings.timeout_s
    here = address
    for _ in range(_MOST_REDIRECTS + 1):
        parts = _checked_parts(address, here)
        try:
            found = _answer(parts, settings, deadline)
        except (OSError, HTTPException, UnicodeError) as error:
            reason = f"{type(error).__name__}: {error}"
            if time.monotonic() >= deadline:
                reason = f"it took more than {settings.timeout_s:g} s"
            raise _failed(address, reason) from error
        except _RefusedError as error:
            raise _failed(address, str(error)) from error
        if isinstance(found, bytes):
            return found
        here = urljoin(here, found)
        if parts.scheme == "https" and urlsplit(here).scheme != "https":
            raise _failed(address, f"it leads from https to {shown(here)!r}")
    raise _failed(address, f"more than {_MOST_REDIRECTS} redirects")


def _checked_parts(address: str, here: str) -> SplitResult:
    with suppress(ValueError):
        parts = urlsplit(here)
        if parts.scheme in _PORTS and parts.hostname and parts.username is None and parts.port != 0:
            return parts
    raise _failed(address, f"{shown(here)!r} is not http(s)://host/path")


def _answer(parts: SplitResult, settings: RemoteSettings, deadline: float) -> bytes | str:
    """The body of a GET's answer, or where it leads.

    Raises:
        _RefusedError: the host is not public, the server refuses, or the body is too large.
        OSError, HTTPException: the connection broke, or was shut at the deadline.
        UnicodeError: the host is no name.
    """
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    plain = _connected(host, port, host in settings.allowed_hosts, deadline)
    # The watched socket is of its own, since TLS takes the plain one's place.
    with plain, plain.dup() as watched, closing(HTTPConnection(host, port)) as connection:
        timer = Timer(max(0, deadline - time.monotonic()), _shut, [watched])
        timer.daemon = True
        timer.start()
        try:
            connection.sock = plain
            if parts.scheme == "https":
                connection.sock = _tls().wrap_socket(plain, server_hostname=host)
            query = f"?{quote(parts.query, safe=_KEPT)}" if parts.query else ""
            path = quote(parts.path or "/", safe=_KEPT) + query
            connection.request("GET", path, headers={"User-Agent": "paddle-vl"})
            with connection.getresponse() as answer:
                return _read(answer, settings.max_bytes, deadline)
        finally:
            timer.cancel()


def _connected(host: str, port: int, is_allowed: bool, deadline: float) -> socket.socket:
    """A connection to one of a name's addresses, all of which were checked."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(place[0]) for *_, place in found))
    if not is_allowed and (private := [each for each in addresses if not _is_public(each)]):
        raise _RefusedError(
            f"{host} has the address {private[0]}, which is not public; name the host as allowed "
            "if that is meant"
        )
    for address in addresses[:-1]:
        with suppress(OSError):
            return socket.create_connection((address, port), _seconds_to(deadline))
    return socket.create_connection((addresses[-1], port), _seconds_to(deadline))


def _is_public(text: str) -> bool:
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        inner = IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
        address = address.ipv4_mapped or address.sixtofour or inner or address
    return address.is_global and not address.is_multicast


def _read(answer: HTTPResponse, max_bytes: int, deadline: float) -> bytes | str:
    target = answer.getheader("Location")
    if answer.status in _REDIRECTS and target is not None:
        return target
    if answer.status != 200:
        raise _RefusedError(f"the server says {answer.status} {answer.reason}")
    if encoding := answer.getheader("Content-Encoding"):
        raise _RefusedError(f"the server sends it compressed ({encoding}), which was not asked for")
    body = bytearray()
    while len(body) + (answer.length or 0) <= max_bytes and (block := answer.read(_BLOCK)):
        body += block
    if len(body) + (answer.length or 0) > max_bytes:
        raise _RefusedError(f"it has more than {max_bytes} bytes, the limit")
    # An end of the connection without a length looks complete, also at the deadline.
    if answer.length or time.monotonic() >= deadline:
        raise IncompleteRead(bytes(body), answer.length)
    return bytes(body)


class _RefusedError(Exception):
    """An answer that is not taken; the message says why."""


def _seconds_to(deadline: float) -> float:
    # 0 would mean without waiting.
    return max(0.001, deadline - time.monotonic())


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _failed(address: str, reason: str) -> BadSampleError:
    return BadSampleError("remote", f"{shown(address)!r} cannot be fetched: {reason}; {_SAVE_IT}")
