"""Streaming detokenization: token ids to pieces of text."""

from collections.abc import Callable, Iterable, Iterator, Sequence

_INCOMPLETE = "\ufffd"
Decode = Callable[[Sequence[int]], str]


def text_pieces(ids: Iterable[int], decode: Decode, continues: bool = False) -> Iterator[str]:
    """Pieces of text as soon as they are final; joined, they are the stripped text of all ids.

    A character of several tokens is emitted with its last one, and space with the text after it.

    Args:
        decode: text of ids, with U+FFFD for incomplete characters.
        continues: the ids go on after a text, so that space in front of them stays.
    """
    return _stripped(_certain_text(ids, decode), has_begun=continues)


class TextStream:
    """Text of ids that come one by one.

    Each step decodes only the new ids with those of the last piece, on which their text may depend.
    """

    def __init__(self, decode: Decode):
        self._decode = decode
        self._last: list[int] = []  # Ids of the last piece.
        self._new: list[int] = []  # And those after it.

    def push(self, token_id: int) -> str:
        """The text that is final with this id; empty within a character."""
        self._new.append(token_id)
        text = self._decode(self._last + self._new)
        return "" if text.endswith(_INCOMPLETE) else self._taken(text)

    def end(self) -> str:
        """The text that is left, with U+FFFD for what is incomplete."""
        return self._taken(self._decode(self._last + self._new))

    def _taken(self, text: str) -> str:
        """The new part of a text of the last and the new ids."""
        begin = len(self._decode(self._last))
        self._last, self._new = self._new, []
        return text[begin:]


def _certain_text(ids: Iterable[int], decode: Decode) -> Iterator[str]:
    stream = TextStream(decode)
    for token_id in ids:
        yield stream.push(token_id)
    yield stream.end()


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
