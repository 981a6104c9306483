"""Reading tokenizer.json with errors that name the file, which the library's own do not."""

from pathlib import Path

from tokenizers import Tokenizer

from paddle_vl.files.text_file import parse_json_object, read_text, shown

TOKENIZER_FILE = "tokenizer.json"
# Saving and fingerprinting take time and memory for every id up to the highest.
_MOST_IDS = 1 << 24
# Contains characters outside of nearly every vocabulary, so that encoding needs the unknown token.
_UNKNOWN = "a \u0378\U000e0080\n"
_WHAT, _REMEDY = "a tokenizer file", "fetch or save it again"


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, with its own truncation and padding turned off.

    Raises:
        RuntimeError: the file is missing, is not a tokenizer, cannot encode every text, has a
            dropout, or has ids of 2**24 or more.
    """
    text = read_text(file, _WHAT, _REMEDY)
    values = parse_json_object(text, file, _WHAT, _REMEDY)
    if "model" not in values:
        raise RuntimeError(f"{file} is not {_WHAT}: it has no 'model' entry; {_REMEDY}")
    if isinstance(model := values["model"], dict) and (dropout := model.get("dropout")):
        raise RuntimeError(
            f"{file} has model.dropout {shown(dropout)}: the same text would give other tokens "
            "each time, in training, answers and resumed runs; set it to null in the file"
        )
    try:
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # Otherwise the error would only come with the first unknown character in the data.
        tokenizer.decode(tokenizer.encode(_UNKNOWN).ids)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # The library raises bare Exceptions, and its panics derive from BaseException.
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
    """The largest token id; -1 for an empty vocabulary."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
