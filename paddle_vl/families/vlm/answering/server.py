"""A server with OpenAI's interface, as its clients ask it: requests that are tried again, and
messages whose images travel as data URIs."""

import base64
import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from paddle_vl.data.media_file import ImageSection, load_rgb

_MOST_WAIT_S, _SHOWN = 600.0, 500
_BROKEN = (OSError, HTTPException)


class NoSuchPathError(RuntimeError):
    """The server has nothing at an address."""


class ServerClient:
    """
    Args:
        key: the server's token.
        timeout_s: of a request.
        retries: after a broken connection, a late answer or a failure of the server.

    Attributes:
        is_over: set to wait no longer.
    """

    def __init__(self, key: str | None, timeout_s: float = 3600.0, retries: int = 0):
        self._key, self._timeout_s, self._retries = key, timeout_s, retries
        self.is_over = threading.Event()

    def post(self, url: str, fields: Mapping[str, Any]) -> bytes:
        """The answer to a request, which is sent later again when the server says that it has too
        much to do.

        Raises:
            RuntimeError: there is none; says what the server said.
            NoSuchPathError: it says 404.
        """
        body, waited, tries = json.dumps(fields).encode(), 0.0, 0
        while True:
            try:
                return self._posted(url, body)
            except _BROKEN as error:
                status = error.code if isinstance(error, HTTPError) else None
                seconds = 1.0  # Of a server that does not say it, or says a date.
                if isinstance(error, HTTPError) and status == 429 and waited < _MOST_WAIT_S:
                    with suppress(TypeError, ValueError):
                        given = float(error.headers["Retry-After"])
                        seconds = min(max(given, 0.1), _MOST_WAIT_S)
                elif tries < self._retries and (status is None or status >= 500):
                    seconds, tries = 2.0**tries, tries + 1
                else:
                    seconds = 0.0
                if not seconds or self.is_over.is_set():
                    told = str(error) or repr(error)
                    if isinstance(error, HTTPError):
                        told += f" {error.read(_SHOWN).decode(errors='replace')}"
                    kind = NoSuchPathError if status == 404 else RuntimeError
                    raise kind(f"no answer of {url}: {told}") from error
                waited += seconds
                self.is_over.wait(seconds)

    def _posted(self, url: str, body: bytes) -> bytes:
        request = Request(url, body, {"Content-Type": "application/json"})
        if self._key is not None:
            # Not for a host that the request may be redirected to.
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        with urlopen(request, timeout=self._timeout_s) as answer:
            return answer.read()


def answer_text(choice: Mapping[str, Any]) -> str:
    """The text of an answer, with the reasoning in front as a model writes it."""
    message = choice["message"]
    content = message.get("content") or ""
    thought = message.get("reasoning_content") or message.get("reasoning")
    return f"{thought}</think>{content}" if thought and content else thought or content


def asked_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of texts and images, which become data URIs."""
    parts = []
    for part in message["content"]:
        if part["type"] == "image":
            source = part["image"]
            if isinstance(source, ImageSection):
                section = BytesIO()
                load_rgb(source).save(section, format="PNG")
                source = section.getvalue()
            data = source if isinstance(source, bytes) else Path(source).read_bytes()
            kind = "jpeg" if data.startswith(b"\xff\xd8") else "png"  # Servers look themselves.
            uri = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
            part = {"type": "image_url", "image_url": {"url": uri}}
        parts.append(part)
    return {"role": message["role"], "content": parts}
