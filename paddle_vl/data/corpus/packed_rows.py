"""Packed rows of a mix of sources: pure functions of the seed, made in independent strands.

Row k of the endless stream of rows belongs to strand `k % num_strands`. A strand takes every
`num_strands`-th document of each source and packs them one after the other; where a row is full,
the document continues in the strand's next row. So strands need nothing of each other, and neither
the number of ranks nor that of workers changes a row. What a strand needs to continue is a
`StrandState`, a few numbers.

The next document comes from the source that lags behind its share most. Random starts of the lags
make the sources of the first rows of many strands follow the shares too.

Shapes: S sources.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paddle_vl.config.data_sources import SourceConfig
from paddle_vl.data.corpus.document import EncodedDocument, Sample
from paddle_vl.data.corpus.sources import Source
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.packing import RowBudget
from paddle_vl.data.worker_pool import MAX_BAD_IN_A_ROW, note_sample

# Documents that may wait for a row with room for their next piece.
_MOST_WAITING = 16
# More than a source's stream has; one number says source and document in the table of progress.
DOCUMENTS = 1 << 48
# Documents whose tokens are counted for the starts of a mix.
_MEASURED = 32
# A text piece of one token would have no target.
_SHORTEST = 2


@dataclass(frozen=True)
class Mix:
    """Shares of the sources.

    Attributes:
        shares: `[S]`, positive.
        counts_tokens: whether shares are of tokens; otherwise of documents.
        seed: of the starts of the lags.
        sizes: `[S]` size of a source's document in that unit, weighted by itself: the mean of the
            squares divided by the mean.
    """

    shares: tuple[float, ...]
    counts_tokens: bool
    seed: int
    sizes: tuple[float, ...]

    def starts(self, strand: int) -> np.ndarray:
        """`[S]` what each source has ahead at the beginning of a strand.

        Uniform below a document's size, as if the strand had run for ever. One source, drawn by the
        shares, is first: a place of a stream without begin is most likely in a long document.
        """
        rng = np.random.default_rng([self.seed, strand])
        starts = rng.uniform(size=len(self.shares)) * self.sizes
        shares = np.asarray(self.shares)
        starts[rng.choice(len(shares), p=shares / shares.sum())] = -1.0
        return starts


def mix_of(
    configs: Sequence[SourceConfig],
    sources: Sequence[Source],
    temperature: float | None,
    seed: int,
) -> Mix:
    """Shares by weights (of tokens), or by numbers of documents to the power of 1 / temperature (of
    documents). For shares of tokens a few documents of each source are measured."""
    weights = [config.weight for config in configs]
    if all(weight is not None for weight in weights):
        shares = tuple(float(weight or 0) for weight in weights)
        return Mix(shares, True, seed, tuple(map(_typical_size, sources)))
    power = 1.0 if temperature is None else 1.0 / temperature
    shares = tuple(source.num_documents**power for source in sources)
    return Mix(shares, False, seed, (1.0,) * len(shares))


def _typical_size(source: Source) -> float:
    """Tokens of a document, weighted by themselves, from the first ones of the stream."""
    sizes: list[int] = []
    for number in range(min(_MEASURED, source.num_documents)):
        # A run says what is wrong with a bad document when it comes to it.
        with suppress(BadSampleError):
            sizes.append(len(source.document(source.order.document(number))))
    return sum(size**2 for size in sizes) / sum(sizes) if sizes else 1.0


@dataclass(frozen=True)
class Waiting:
    """A document with tokens left: its source, its number in the source's stream, and the first of
    these tokens."""

    source: int
    number: int
    begin: int


@dataclass(frozen=True)
class StrandState:
    """What a strand needs to make its next row.

    Attributes:
        drawn: `[S]` documents taken from each source.
        tokens: `[S]` tokens of these documents.
        waiting: documents that continue, oldest first.
        skipped: bad documents so far, by kind of fault.
    """

    drawn: tuple[int, ...]
    tokens: tuple[int, ...]
    waiting: tuple[Waiting, ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)

    @classmethod
    def new(cls, num_sources: int) -> "StrandState":
        return cls((0,) * num_sources, (0,) * num_sources)

    def to_json(self) -> list[Any]:
        """JSON values; see `from_json`."""
        waiting = [[each.source, each.number, each.begin] for each in self.waiting]
        return [list(self.drawn), list(self.tokens), waiting, self.skipped]

    @classmethod
    def from_json(cls, values: Any) -> "StrandState":
        drawn, tokens, waiting, skipped = values
        return cls(
            tuple(drawn), tuple(tokens), tuple(Waiting(*each) for each in waiting), dict(skipped)
        )


@dataclass(frozen=True)
class Piece:
    """A part of a document in a row."""

    source: int
    sample: Sample
    is_first: bool


class RowMaker:
    """Makes the rows of strands.

    Attributes:
        sources: documents of each source.
        num_strands: strands of the stream of rows.
        budget: limits of a row.
        one_piece: a row has one piece only, as without packing.
        on_bad_sample: "fail", or "skip" to leave bad documents out and count them.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        mix: Mix,
        num_strands: int,
        budget: RowBudget,
        *,
        one_piece: bool = False,
        on_bad_sample: str = "fail",
    ):
        self.sources, self.mix, self.num_strands = sources, mix, num_strands
        self.budget, self.one_piece, self.on_bad_sample = budget, one_piece, on_bad_sample
        # Encoded documents that wait, by strand, to save encoding them again in the next row.
        self._kept: dict[int, dict[tuple[int, int], EncodedDocument]] = {}

    def row(self, strand: int, state: StrandState) -> tuple[list[Piece], StrandState]:
        """The strand's next row, and its state afterwards.

        Raises:
            BadSampleError: a bad document where they are not skipped, or too many in a row.
        """
        row = _Row(self, strand, state, self._kept.pop(strand, {}))
        pieces = row.fill()
        keys = [(each.source, each.number) for each in row.waiting]
        self._kept[strand] = {key: row.documents[key] for key in keys if key in row.documents}
        new = StrandState(
            tuple(row.drawn), tuple(row.tokens), tuple(row.waiting), dict(row.skipped)
        )
        return pieces, new


class _Row:
    """One row while it is made."""

    def __init__(
        self,
        maker: RowMaker,
        strand: int,
        state: StrandState,
        kept: dict[tuple[int, int], EncodedDocument],
    ):
        self.maker, self.strand, self.documents = maker, strand, kept
        self.drawn, self.tokens = list(state.drawn), list(state.tokens)
        self.waiting, self.skipped = list(state.waiting), Counter(state.skipped)
        self._starts = maker.mix.starts(strand)
        self._bad_in_a_row = 0

    def fill(self) -> list[Piece]:
        budget, pieces, at = self.maker.budget, list[Piece](), 0
        tokens, vision, mix = budget.tokens, budget.vision_limit, self.maker.mix
        while tokens >= _SHORTEST and not (pieces and self.maker.one_piece):
            is_new = at == len(self.waiting)
            if is_new:
                if at == _MOST_WAITING:
                    break
                # The next document of the source that lags most.
                taken = self.tokens if mix.counts_tokens else self.drawn
                source = int(np.argmin((self._starts + taken) / mix.shares))
                number = self.strand + self.drawn[source] * self.maker.num_strands
                self.drawn[source] += 1
                self.waiting.append(Waiting(source, number, 0))
            each = self.waiting[at]
            try:
                document = self._document(each)
                if is_new:
                    self.tokens[each.source] += len(document)
                end = self._end(document, each.begin, tokens, vision)
                if end is None:
                    at += 1
                    continue
                sample = document.piece(each.begin, end)
            except BadSampleError as error:
                self._leave_out(at, error)
                continue
            self._bad_in_a_row = 0
            pieces.append(Piece(each.source, sample, each.begin == 0))
            tokens -= end - each.begin
            vision -= document.vision_tokens(each.begin, end)
            if end == len(document):
                del self.waiting[at]
            else:
                self.waiting[at] = replace(each, begin=document.next_begin(end))
                # The rest begins the next row: a document has one piece in a row.
                at += 1
        return pieces

    def _end(self, document: EncodedDocument, begin: int, tokens: int, vision: int) -> int | None:
        """End of the piece for this row, None if it has to wait for the next."""
        end = document.end_of_piece(begin, tokens, vision)
        if end == len(document):
            return end
        budget = self.maker.budget
        in_empty_row = document.end_of_piece(begin, budget.tokens, budget.vision_limit)
        if in_empty_row is None:
            raise document.too_large(begin, budget)
        if document.is_whole and begin == 0 and in_empty_row == len(document):
            return None
        return end

    def _document(self, each: Waiting) -> EncodedDocument:
        key = (each.source, each.number)
        note_sample(each.source * DOCUMENTS + each.number)
        if key not in self.documents:
            self.documents[key] = self.maker.sources[each.source].encoded(each.number)
        return self.documents[key]

    def _leave_out(self, at: int, error: BadSampleError) -> None:
        each = self.waiting.pop(at)
        self.documents.pop((each.source, each.number), None)
        if error.place is None:
            place = self.maker.sources[each.source].where(each.number)
            error = BadSampleError(error.kind, error.reason, place)
        if self.maker.on_bad_sample == "fail":
            raise error
        self.skipped[error.kind] += 1
        self._bad_in_a_row += 1
        if self._bad_in_a_row > MAX_BAD_IN_A_ROW:
            raise BadSampleError(
                error.kind,
                f"more than {MAX_BAD_IN_A_ROW} documents in a row are bad; the last is: "
                f"{error.reason}",
                error.place,
            )
