"""The token of a server, which its clients send."""

import os
from pathlib import Path

TOKEN_VARIABLE = "PADDLE_VL_SERVER_TOKEN"


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
