"""Who may use a server: a token, and the addresses that it listens at without one."""

import hmac
import ipaddress

from paddle_vl.files.token_file import TOKEN_VARIABLE

# openpi's clients send the first.
_SCHEMES = ("api-key", "bearer")


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
