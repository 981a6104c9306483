"""Rows of a mix of sources.

Guarantees: text continues over a row's end, where the last token is repeated as context, so that
every text token is a target once; an image with its tokens is never cut, nor parted from the first
text token behind it; captions keep their image; the limits of a row hold; rows are over 99 % full;
shares are those of the weights, in tokens or documents; bad documents are refused or left out.
"""

from collections import Counter

import numpy as np
import pytest

from paddle_vl.config.data_sources import SourceConfig
from paddle_vl.data.corpus.order import DocumentOrder
from paddle_vl.data.corpus.packed_rows import Mix, RowMaker, StrandState, mix_of
from paddle_vl.data.corpus.sources import Source
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.packing import RowBudget
from tests.single_card_tests.data.corpus.made_documents import (
    END,
    PAD,
    SPAN,
    START,
    TEXT,
    MadeSource,
)

BUDGET = RowBudget(256, 96)
SOURCES = (MadeSource("text", 1), MadeSource("caption", 2), MadeSource("page", 3))
SHARES = (0.5, 0.25, 0.25)


def maker(sources=SOURCES, shares=SHARES, counts_tokens=True, budget=BUDGET, **settings):
    sizes = (120.0, 40.0, 200.0)[: len(shares)] if counts_tokens else (1.0,) * len(shares)
    mix = Mix(tuple(shares), counts_tokens, 7, sizes)
    return RowMaker(sources, mix, 4, budget, **settings)


def rows_of(made: RowMaker, count: int, strand: int = 1):
    state = StrandState.new(len(made.sources))
    rows = []
    for _ in range(count):
        row, state = made.row(strand, state)
        rows.append(row)
    return rows, state


@pytest.fixture(scope="module")
def rows():
    return rows_of(maker(), 400)[0]


def test_rows_are_over_99_percent_full_within_their_limits(rows):
    tokens = [sum(len(piece.sample["kinds"]) for piece in row) for row in rows]
    vision = [sum((piece.sample["kinds"] == PAD).sum() for piece in row) for row in rows]
    assert max(tokens) <= 256
    assert max(vision) <= 96
    assert sum(tokens) / len(rows) / 256 > 0.99


def test_every_text_token_is_a_target_once_and_visual_tokens_never(rows):
    targets: Counter[int] = Counter()
    last: dict[int, int] = {}
    for piece in (piece for row in rows for piece in row):
        ids, labels = piece.sample["input_ids"], piece.sample["labels"]
        targets.update(labels[1:][labels[1:] != -100].tolist())
        document, end = int(ids[0]) // SPAN, int(ids[-1]) % SPAN
        last[document] = max(last.get(document, 0), end)
    assert set(targets.values()) == {1}
    by_document: dict[int, set[int]] = {}
    for target in targets:
        by_document.setdefault(target // SPAN, set()).add(target % SPAN)
    for document, end in last.items():
        made = SOURCES[document // 1_000_000 - 1].encoded(document % 1_000_000)
        # The first token of a document has nothing before it.
        wanted = {i for i in range(1, end + 1) if made.kinds[i] == TEXT}
        assert by_document.get(document, set()) == wanted


def test_images_are_never_cut_nor_parted_from_the_text_behind_them(rows):
    cuts = 0
    for piece in (piece for row in rows for piece in row):
        kinds = piece.sample["kinds"]
        assert kinds[0] in (TEXT, START)
        # After the last token of an image its first text token follows, unless an image does.
        made = SOURCES[int(piece.sample["input_ids"][0]) // SPAN // 1_000_000 - 1].encoded(
            int(piece.sample["input_ids"][0]) // SPAN % 1_000_000
        )
        stop = int(piece.sample["input_ids"][-1]) % SPAN + 1
        if stop < len(made):
            cuts += 1
            assert kinds[-1] == TEXT or (kinds[-1] == END and made.kinds[stop] == START)
    assert cuts > 100


def test_a_caption_is_in_one_row_with_its_image(rows):
    captions = [piece for row in rows for piece in row if piece.source == 1]
    assert len(captions) > 100
    assert all(piece.is_first and piece.sample["kinds"][0] == START for piece in captions)


def test_documents_of_a_lane_are_those_of_its_places_in_order(rows):
    firsts = {source: [] for source in range(3)}
    for piece in (piece for row in rows for piece in row):
        if piece.is_first:
            number = int(piece.sample["input_ids"][0]) // SPAN % 1_000_000
            firsts[piece.source].append(number)
    for numbers in firsts.values():
        assert {number % 4 for number in numbers} == {1}
        # Captions that wait for room may be overtaken by few.
        assert np.abs(np.sort(numbers) - np.array(numbers)).max() <= 16 * 4


def test_shares_of_tokens_follow_the_weights():
    """Also where texts continue over several rows."""
    sources = (MadeSource("text", 1, 600), *SOURCES[1:])
    placed = np.zeros(3)
    for piece in (piece for row in rows_of(maker(sources), 600)[0] for piece in row):
        placed[piece.source] += len(piece.sample["kinds"])
    np.testing.assert_allclose(placed / placed.sum(), SHARES, atol=0.015)


def test_first_rows_of_many_lanes_follow_the_weights():
    """Although documents of the first source are much longer."""
    sources = (MadeSource("text", 1, 300), MadeSource("text", 2, 20))
    made = RowMaker(sources, Mix((1.0, 1.0), True, 7, (600.0, 42.0)), 600, BUDGET)
    tokens = np.zeros(2)
    for strand in range(600):
        for piece in made.row(strand, StrandState.new(2))[0]:
            tokens[piece.source] += len(piece.sample["kinds"])
    assert tokens[0] / tokens.sum() == pytest.approx(0.5, abs=0.04)


def test_shares_of_documents_follow_their_numbers():
    _, state = rows_of(maker(shares=(60.0, 30.0, 10.0), counts_tokens=False), 600)
    drawn = np.array(state.drawn) / sum(state.drawn)
    np.testing.assert_allclose(drawn, (0.6, 0.3, 0.1), atol=0.01)


@pytest.mark.parametrize(
    ("weights", "temperature", "shares", "counts_tokens"),
    [
        ((2.0, 1.0), None, (2.0, 1.0), True),
        ((None, None), None, (10_000.0, 100.0), False),
        ((None, None), 2.0, (100.0, 10.0), False),
    ],
)
def test_a_mix_has_weights_or_a_temperature(
    weights, temperature, shares, counts_tokens, monkeypatch
):
    monkeypatch.setattr("paddle_vl.data.corpus.packed_rows._MEASURED", 0)
    configs = [SourceConfig(path="a", format="text", weight=weight) for weight in weights]
    sources = [
        Source("a", (), DocumentOrder((count,), None, 0), None)  # type: ignore[arg-type]
        for count in (10_000, 100)
    ]
    mix = mix_of(configs, sources, temperature, seed=1)
    assert mix.counts_tokens is counts_tokens
    np.testing.assert_allclose(mix.shares, shares)


def test_only_documents_that_wait_are_kept():
    made = maker()
    state = StrandState.new(3)
    for _ in range(50):
        _, state = made.row(1, state)
        kept = made._kept[1]
        assert kept.keys() <= {(each.source, each.number) for each in state.waiting}
    assert len(kept) <= 16


def test_without_packing_a_row_is_one_piece():
    rows, _ = rows_of(maker(one_piece=True), 50)
    assert {len(row) for row in rows} == {1}
    assert any(not row[0].is_first for row in rows)


def test_bad_documents_are_left_out_and_counted():
    sources = (MadeSource("text", 1, bad=3), MadeSource("caption", 2))
    rows, state = rows_of(maker(sources, (1.0, 1.0), on_bad_sample="skip"), 60)
    numbers = {int(p.sample["input_ids"][0]) // SPAN % 1_000_000 for r in rows for p in r
               if p.source == 0}  # fmt: skip
    assert not {number for number in numbers if number % 3 == 0}
    assert state.skipped == {"made_bad": sum(n % 3 == 0 for n in range(1, state.drawn[0] * 4, 4))}


def test_a_bad_document_ends_the_run_with_its_place():
    sources = (MadeSource("text", 1, bad=3),)
    with pytest.raises(BadSampleError, match=r"text:9: it is bad"):
        rows_of(maker(sources, (1.0,)), 60)


def test_only_bad_documents_end_the_run_though_they_are_skipped():
    sources = (MadeSource("text", 1, bad=1),)
    with pytest.raises(BadSampleError, match="1000 documents in a row are bad"):
        rows_of(maker(sources, (1.0,), on_bad_sample="skip"), 1)


@pytest.mark.parametrize("budget", [RowBudget(256, 12), RowBudget(16)])
def test_an_image_that_fits_no_row_is_refused(budget):
    sources = (MadeSource("page", 3),)
    with pytest.raises(BadSampleError, match="which fit no row"):
        rows_of(maker(sources, (1.0,), budget=budget), 60)
