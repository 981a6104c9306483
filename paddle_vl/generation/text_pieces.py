"""Token ids to text while they come."""

from collections.abc import Callable, Iterable, Iterator, Sequence

_INCOMPLETE = "\ufffd"


def text_pieces(ids: Iterable[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Text as soon as it is certain; joined, the pieces are the text of all ids, outer space off.

    A character of several tokens is held back until its last one, and space until something
    follows it. Only the ids since the last certain text are decoded again, with those of the piece
    before them, on which their own text may depend.

    Args:
        decode: text of ids, with U+FFFD for bytes that are no character (yet).
    """
    return _stripped(_certain_text(ids, decode))


def _certain_text(ids: Iterable[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    last, new = [], []  # ids of the last piece, and of the text that is not certain yet
    for token_id in ids:
        new.append(token_id)
        text = decode(last + new)
        if not text.endswith(_INCOMPLETE):
            yield text[len(decode(last)) :]
            last, new = new, []
    yield decode(last + new)[len(decode(last)) :]


def _stripped(pieces: Iterable[str]) -> Iterator[str]:
    held, has_begun = "", False
    for piece in pieces:
        text = held + piece
        if not has_begun:
            text = text.lstrip()
        certain = text.rstrip()
        held = text[len(certain) :]
        if certain:
            has_begun = True
            yield certain
