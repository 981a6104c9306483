"""Who may use a server: a token, and the addresses that it listens at without one."""

import hmac
import ipaddress
import os
from pathlib import Path

TOKEN_VARIABLE = "PADDLE_VL_SERVER_TOKEN"
# openpi's clients send the first.
_SCHEMES = ("api-key", "bearer")


def read_token(file: str | None, variable: str = TOKEN_VARIABLE) -> str | None:
    """The token of a file, or else of a variable of the environment; None without both.

    Raises:
        ValueError: it is empty.
        OSError: the file cannot be read.
    """
    token = os.environ.get(variable)
    if file is not None:
        token = Path(file).read_text(encoding="utf-8").strip()
    if token is not None and not token:
        source = variable if file is None else file
        raise ValueError(f"{source} holds no token: write one, or leave it out")
    return token


def is_allowed(authorization: str | None, token: str | None) -> bool:
    """Whether an Authorization header, `Api-Key TOKEN` or `Bearer TOKEN`, has the server's token.
    The time that this takes does not tell how much of it is right."""
    if token is None:
        return True
    scheme, _, given = (authorization or "").partition(" ")
    is_equal = hmac.compare_digest(given.strip().encode(), token.encode())
    return is_equal and scheme.lower() in _SCHEMES


def check_exposure(host: str, token: str | None, is_open: bool) -> None:
    """Refuse to listen for other machines without a token, unless that is asked for.

    Raises:
        ValueError: names the remedies.
    """
    if token is not None or is_open or host == "localhost":
        return
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        raise ValueError(
            f"--host {host} lets other machines use what is served: set a token (--token-file, or "
            f"{TOKEN_VARIABLE}), or say --allow-anyone"
        )
