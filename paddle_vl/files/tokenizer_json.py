"""Reading the `tokenizers` library's file, whose faults the library tells without its name."""

from pathlib import Path

from tokenizers import Tokenizer

from paddle_vl.files.json_file import parse_json_object, read_text, shown

TOKENIZER_FILE = "tokenizer.json"
# Writing a file, and its fingerprint, take time and memory for every id up to the highest.
_MOST_IDS = 1 << 24
# Characters that hardly any vocabulary has: what stands for unknown ones is needed.
_UNKNOWN = "a \u0378\U000e0080\n"
_WHAT, _REMEDY = "a tokenizer file", "fetch or save it again"


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, which neither cuts nor fills texts by itself.

    Raises:
        RuntimeError: the file is not there, or not a tokenizer, or one that cannot encode every
            text, or has ids beyond sense.
    """
    text = read_text(file, _WHAT, _REMEDY)
    if "model" not in parse_json_object(text, file, _WHAT, _REMEDY):
        raise RuntimeError(f"{file} is not {_WHAT}: it has no 'model' entry; {_REMEDY}")
    try:
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # Otherwise the first text with an unknown character would tell, far from the file.
        tokenizer.decode(tokenizer.encode(_UNKNOWN).ids)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # It raises bare Exceptions, and where it did not expect a fault its panics are not even
        # these.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            reason = str(error)[:200]
            raise RuntimeError(f"{file} is not {_WHAT}: {reason}; {_REMEDY}") from error
        raise
    if (highest := highest_id(tokenizer)) >= _MOST_IDS:
        token = tokenizer.id_to_token(highest)
        raise RuntimeError(
            f"{file} is not {_WHAT}: the id of {shown(token)} is {highest}; at most "
            f"{_MOST_IDS - 1} is supported; {_REMEDY}"
        )
    return tokenizer


def highest_id(tokenizer: Tokenizer) -> int:
    """The largest id that it can give; -1 of an empty vocabulary."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
