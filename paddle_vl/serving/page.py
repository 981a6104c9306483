"""The page at `/`, one file; its policy lets it load nothing, and ask its own server alone."""

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from starlette.responses import HTMLResponse

_FILE = Path(__file__).with_name("page.html")
_POLICY = (
    "default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; "
    "connect-src 'self'; img-src data: blob:; media-src blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_response() -> HTMLResponse:
    """The page with its headers."""
    content = _FILE.read_text(encoding="utf-8")
    found = re.findall(r"<(style|script)>(.*?)</\1>", content, re.DOTALL)
    hashes = {tag: b64encode(sha256(text.encode()).digest()).decode() for tag, text in found}
    headers = {
        "content-security-policy": _POLICY.format(**hashes),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return HTMLResponse(content, headers=headers)
