"""The loader of a mix of sources.

Guarantees: the rows are the same over any number of ranks and workers; a resumed stream continues
to the row, also on another number of ranks; tokens and documents of each source are counted;
resuming with other data or settings is refused by name.
"""

import json
import time
from itertools import islice

import numpy as np
import pytest

from paddle_vl.data.corpus.loader import CorpusLoader, merged_states
from paddle_vl.data.corpus.packed_rows import Mix, RowMaker
from paddle_vl.data.packing import RowBudget
from tests.single_card_tests.data.corpus.made_documents import MadeSource, collate

ROWS = 4
SOURCES = (MadeSource("text", 1), MadeSource("caption", 2), MadeSource("page", 3, bad=5))


def loader(rank: int = 0, size: int = 1, seed: int = 3, stream=None, **settings) -> CorpusLoader:
    batch_size = ROWS // size
    mix = Mix((0.5, 0.25, 0.25), True, seed, (120.0, 40.0, 200.0))
    strands = CorpusLoader.num_strands(batch_size, size)
    maker = RowMaker(SOURCES, mix, strands, RowBudget(256, 96), on_bad_sample="skip")
    return CorpusLoader(
        maker, collate, batch_size, names=["text", "captions", "pages"], num_documents=900,
        stream=stream or {"seed": seed}, rank=rank, size=size, **settings,
    )  # fmt: skip


def take(batches: CorpusLoader, count: int) -> list:
    return [batch["rows"] for batch in islice(batches, count)]


def global_rows(size: int, count: int, state=None) -> list:
    """Rows of the global batches, from loaders of all ranks."""
    ranks = [loader(rank, size) for rank in range(size)]
    for each in ranks if state else ():
        each.load_state_dict(json.loads(json.dumps(state)))
    per_rank = [take(each, count) for each in ranks]
    return [
        [per_rank[row % size][step][row // size] for row in range(ROWS)] for step in range(count)
    ]


@pytest.fixture(scope="module")
def stream() -> list:
    """Longer than the number of strands, so that every strand goes on."""
    return take(loader(), 40)


@pytest.mark.parametrize("size", [2, 4])
def test_rows_are_the_same_over_any_number_of_ranks(stream, size):
    assert global_rows(size, 40) == stream


def test_another_seed_gives_other_rows(stream):
    assert take(loader(seed=4), 5) != stream[:5]


def test_no_row_comes_twice(stream):
    rows = [str(row) for batch in stream for row in batch]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_do_not_change_the_stream(stream, num_workers):
    with loader(num_workers=num_workers, prefetch_batches=5) as batches:
        assert take(batches, 30) == stream[:30]
        state = batches.state_dict()
        assert batches.skipped["made_bad"] > 0
    alone = loader()
    take(alone, 30)
    assert alone.state_dict() == state


@pytest.mark.parametrize(("saved", "was", "size"), [(7, 1, 1), (20, 1, 4), (33, 4, 1), (33, 2, 4)])
def test_a_resumed_stream_continues_to_the_row_on_any_ranks(stream, saved, was, size):
    ranks = [loader(rank, was) for rank in range(was)]
    for each in ranks:
        take(each, saved)
    state = merged_states([each.state_dict() for each in ranks])
    assert global_rows(size, 40 - saved, state) == stream[saved:]


def test_a_state_of_all_ranks_is_that_of_one(stream):
    ranks = [loader(rank, 2) for rank in range(2)]
    for each in ranks:
        take(each, 20)
    alone = loader()
    take(alone, 20)
    assert merged_states([each.state_dict() for each in ranks]) == alone.state_dict()


def test_tokens_and_documents_of_each_source_are_counted(stream):
    batches = list(islice(loader(), 40))
    tokens = np.sum([batch["source_tokens"] for batch in batches], axis=0)
    documents = np.sum([batch["source_documents"] for batch in batches], axis=0)
    pieces = [piece for batch in batches for row in batch["rows"] for piece in row]
    for source in range(3):
        own = [piece for piece in pieces if piece[0] // 100_000 // 1_000_000 == source + 1]
        assert tokens[source] == sum(map(len, own))
        assert documents[source] == sum(piece[0] % 100_000 == 0 for piece in own)
    assert tokens.dtype == documents.dtype == np.int64


def test_resuming_with_another_mix_is_refused_by_name():
    one, other = loader(), loader(seed=4)
    take(one, 2)
    with pytest.raises(ValueError, match=r"seed was 3 and is 4. The documents or their order"):
        other.load_state_dict(one.state_dict())
    larger = CorpusLoader(
        one._maker, collate, 8, names=one.names, num_documents=1, stream={"seed": 3}
    )
    with pytest.raises(ValueError, match="global_batch_size was 4 and is 8"):
        larger.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="position is damaged"):
        loader(stream={"seed": 3}).load_state_dict(
            {"stream": {"global_batch_size": 4, "seed": 3}, "epoch": 1}
        )


class StuckSource(MadeSource):
    """Document 64 takes long."""

    def encoded(self, number):
        if number == 64:
            time.sleep(60)
        return super().encoded(number)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_wait_names_the_document(num_workers):
    """The first strand's second document; both are in its first row."""
    mix = Mix((1.0,), True, 3, (60.0,))
    maker = RowMaker([StuckSource("text", 1, 5)], mix, 64, RowBudget(256))
    batches = CorpusLoader(
        maker, collate, 4, names=["text"], num_documents=9, stream={}, num_workers=num_workers
    )
    found = []

    def stop():
        found.append(batches.waiting_for())
        if "text:64" in found[-1]:
            raise TimeoutError

    if num_workers:
        batches.while_waiting = stop
        with pytest.raises(TimeoutError), batches:
            next(batches)
        assert "micro-batch 1 of a mix of text; worker 0 (process" in found[-1]
    else:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(TimeoutError):  # noqa: PT012
            patch.setattr(time, "sleep", lambda seconds: stop())
            next(batches)
        assert "this process prepares it itself" in found[-1]
    assert found[-1].endswith("is at text:64")


def test_epochs_are_no_length_of_a_run():
    with pytest.raises(ValueError, match=r"set train\.max_steps or train\.max_tokens instead"):
        loader().batches_in(2.0)
