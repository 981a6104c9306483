"""Images and videos at http(s) addresses, kept in a cache; and data URIs.

Rows are untrusted: an address must not reach what only this machine can. So names are resolved
here, all their addresses must be public, and the connection goes to a checked one, after every
redirect too. Proxies of the environment are not used: they would resolve names themselves.
"""

import base64
import hashlib
import socket
import ssl
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import shown
from paddle_vl.files.text_file import locked, replacing

_PORTS = {"http": 80, "https": 443}
_REDIRECTS, _MOST_REDIRECTS = (301, 302, 303, 307, 308), 5
_BLOCK = 1 << 16
# IPv6 addresses whose last four bytes are an IPv4 address.
_NAT64 = ip_network("64:ff9b::/96")
# Characters of an address that are sent as they are.
_KEPT = "/%:@!$&'()*+,;=~?[]"
_SAVE_IT = "save it as a file and write its path"


@dataclass(frozen=True)
class RemoteSettings:
    """What may be fetched.

    Attributes:
        max_bytes: of one file.
        timeout_s: for one file, from connecting to the last byte, redirects included.
        cache: folder of fetched files.
        allowed_hosts: names or addresses of hosts that need not be public.
    """

    max_bytes: int = 1 << 26
    timeout_s: float = 30.0
    cache: Path = Path("~/.cache/paddle_vl/remote")
    allowed_hosts: tuple[str, ...] = ()


def fetch(address: str, settings: RemoteSettings) -> Path:
    """The file in the cache with the content of an address, which is fetched once.

    Processes and threads that ask for the same address wait for the first.

    Raises:
        BadSampleError: of kind `remote`: the address or a redirect is no http(s) or not public, the
            server refuses, or a limit is passed.
        OSError: the cache cannot be written.
    """
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


@dataclass(frozen=True)
class RemoteFile:
    """A path that is fetched when it is first used; errors as of `fetch`."""

    address: str
    settings: RemoteSettings

    def __fspath__(self) -> str:
        return str(fetch(self.address, self.settings))


def data_uri_bytes(text: str, max_bytes: int) -> bytes:
    """The content of a `data:` URI in base64; its declared type is ignored.

    Raises:
        BadSampleError: of kind `remote`: it is no such URI, or has more bytes.
    """
    head, comma, payload = text.partition(",")
    size = len(payload) // 4 * 3 - payload[-2:].count("=")
    try:
        if not (comma and head[:5].lower() == "data:" and head[-7:].lower() == ";base64"):
            raise ValueError("data:TYPE;base64,CONTENT is needed")
        if size > max_bytes:
            raise ValueError(f"it has {size} bytes, and the limit is {max_bytes}")
        return base64.b64decode(payload, validate=True)
    except ValueError as error:
        reason = f"the data URI {shown(text)!r} cannot be used: {error}; {_SAVE_IT}"
        raise BadSampleError("remote", reason) from error


def _downloaded(address: str, settings: RemoteSettings) -> bytes:
    deadline = time.monotonic() + settings.timeout_s
    here = address
    try:
        for _ in range(_MOST_REDIRECTS + 1):
            parts = _checked_parts(here)
            found = _answer(parts, settings, deadline)
            if isinstance(found, bytes):
                return found
            here = urljoin(here, found)
            if parts.scheme == "https" and urlsplit(here).scheme == "http":
                raise _RefusedError(f"it leads from https to {shown(here)!r}")
        raise _RefusedError(f"more than {_MOST_REDIRECTS} redirects")
    except _RefusedError as error:
        raise _failed(address, str(error)) from error
    except (OSError, HTTPException, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        if time.monotonic() >= deadline:
            reason = f"it took more than {settings.timeout_s:g} s"
        raise _failed(address, reason) from error


class _RefusedError(Exception):
    """An address or answer that is not taken; the message says why."""


def _checked_parts(here: str) -> SplitResult:
    with suppress(ValueError):
        parts = urlsplit(here)
        if parts.scheme in _PORTS and parts.hostname and parts.username is None and parts.port != 0:
            return parts
    raise _RefusedError(f"{shown(here)!r} is not http(s)://host/path")


def _answer(parts: SplitResult, settings: RemoteSettings, deadline: float) -> bytes | str:
    """The body of a GET's answer, or where it leads."""
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    plain = _connected(host, port, host in settings.allowed_hosts, deadline)
    with plain, closing(HTTPConnection(host, port)) as connection:
        connection.sock = plain
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection.sock = context.wrap_socket(plain, server_hostname=host)
        query = f"?{quote(parts.query, safe=_KEPT)}" if parts.query else ""
        path = quote(parts.path or "/", safe=_KEPT) + query
        connection.request("GET", path, headers={"User-Agent": "paddle-vl"})
        with connection.getresponse() as answer:
            return _read(answer, settings.max_bytes, deadline)


def _connected(host: str, port: int, is_allowed: bool, deadline: float) -> socket.socket:
    """A connection to one of a name's addresses, all of which were checked."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(place[0]) for *_, place in found))
    private = [each for each in addresses if not (is_allowed or _is_public(each))]
    if private:
        raise _RefusedError(f"{host} has the address {private[0]}, which is not public")
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
    target, encoding = answer.getheader("Location"), answer.getheader("Content-Encoding")
    if answer.status in _REDIRECTS and target is not None:
        return target
    if answer.status != 200 or encoding:
        raise _RefusedError(f"the server says {answer.status} {answer.reason} {encoding or ''}")
    body = bytearray()
    while len(body) + (answer.length or 0) <= max_bytes and (block := answer.read1(_BLOCK)):
        body += block
        # The socket's own limit is between two blocks.
        if time.monotonic() >= deadline:
            raise TimeoutError
    if len(body) + (answer.length or 0) > max_bytes:
        raise _RefusedError(f"it has more than {max_bytes} bytes, the limit")
    if answer.length:
        raise IncompleteRead(bytes(body), answer.length)
    return bytes(body)


def _seconds_to(deadline: float) -> float:
    # 0 would mean without waiting.
    return max(0.001, deadline - time.monotonic())


def _failed(address: str, reason: str) -> BadSampleError:
    return BadSampleError("remote", f"{shown(address)!r} cannot be fetched: {reason}; {_SAVE_IT}")
