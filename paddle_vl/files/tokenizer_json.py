"""Reading the `tokenizers` library's file, whose faults the library tells without its name."""

from pathlib import Path

from tokenizers import Tokenizer

from paddle_vl.files.json_file import parse_json_object, read_text

TOKENIZER_FILE = "tokenizer.json"
_WHAT, _REMEDY = "a tokenizer file", "fetch or save it again"


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, which neither cuts nor fills texts by itself.

    Raises:
        RuntimeError: the file is not there, or not a tokenizer.
    """
    text = read_text(file, _WHAT, _REMEDY)
    if "model" not in parse_json_object(text, file, _WHAT, _REMEDY):
        raise RuntimeError(f"{file} is not {_WHAT}: it has no 'model' entry; {_REMEDY}")
    try:
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # It raises bare Exceptions, and where it did not expect a fault its panics are not even
        # these.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            reason = str(error)[:200]
            raise RuntimeError(f"{file} is not {_WHAT}: {reason}; {_REMEDY}") from error
        raise
    return tokenizer


def highest_id(tokenizer: Tokenizer) -> int:
    """The largest id that it can give; -1 of an empty vocabulary."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
