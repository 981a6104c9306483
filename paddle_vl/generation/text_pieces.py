"""Streaming detokenization: token ids to pieces of text."""

from collections.abc import Callable, Iterable, Iterator, Sequence

_INCOMPLETE = "\ufffd"


def text_pieces(
    ids: Iterable[int], decode: Callable[[Sequence[int]], str], continues: bool = False
) -> Iterator[str]:
    """Pieces of text as soon as they are final; joined, they are the stripped text of all ids.

    A character of several tokens is emitted with its last one, and space with the text after it.
    Each step decodes only the new ids with those of the last piece, on which their text may depend.

    Args:
        decode: text of ids, with U+FFFD for incomplete characters.
        continues: the ids go on after a text, so that space in front of them stays.
    """
    return _stripped(_certain_text(ids, decode), has_begun=continues)


def _certain_text(ids: Iterable[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    last, new = [], []  # ids of the last piece, and those after it
    for token_id in ids:
        new.append(token_id)
        text = decode(last + new)
        if not text.endswith(_INCOMPLETE):
            yield text[len(decode(last)) :]
            last, new = new, []
    yield decode(last + new)[len(decode(last)) :]


def _stripped(pieces: Iterable[str], has_begun: bool) -> Iterator[str]:
    held = ""
    for piece in pieces:
        text = held + piece
        if not has_begun:
            text = text.lstrip()
        certain = text.rstrip()
        held = text[len(certain) :]
        if certain:
            has_begun = True
            yield certain
