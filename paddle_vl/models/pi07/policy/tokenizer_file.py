"""Reading files of the `tokenizers` library."""

import json
from pathlib import Path

from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"


def read_json(file: Path, what: str) -> dict:
    """The object in a JSON file.

    Args:
        what: the file should be, for the message.

    Raises:
        RuntimeError: the file cannot be read, or holds something else.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{file} is not {what}: {error}; fetch or save it again") from error
    if not isinstance(values, dict):
        raise RuntimeError(f"{file} is not {what}: it holds a {type(values).__name__}")
    return values


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, which neither cuts nor fills texts by itself.

    Raises:
        RuntimeError: the file is not there, or not a tokenizer.
    """
    # The library reports a bad file by a bare Exception without its name.
    if "model" not in read_json(file, "a tokenizer file"):
        raise RuntimeError(f"{file} is not a tokenizer file: it has no 'model' entry")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
