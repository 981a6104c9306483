"""GPTEmbedding: visual embeddings in their rows, indices once per step, rows of each mp rank.

The oracle of the parallel cases is the unsharded path on the same batch."""

import numpy as np
import paddle
import pytest

from paddle_vl.export import tracing as _tracing  # noqa: F401  Excepts code from conversion.
from paddle_vl.testing import MockedSequenceParallel, forbid_host_reads
from paddle_vl.testing.qwen3_vl import IMAGE, VIDEO, token_rows
from tests.single_card_tests.families.qwen3_vl.embedding_inputs import (
    IMAGES,
    LEVELS,
    MIXED,
    TEXT,
    WIDTH,
    build,
    carried,
    visual_args,
)


def reading_order(ids_BL: np.ndarray, args: dict, images: str, videos: str, level=None):
    """Visual rows one token at a time, in reading order."""
    taken, rows = {IMAGE: 0, VIDEO: 0}, []
    for token in ids_BL.reshape(-1):
        if token in taken:
            source = args[images if token == IMAGE else videos]
            source = source if level is None else source[level]
            rows.append(source.numpy()[taken[token]])
            taken[token] += 1
    return np.array(rows)


@pytest.mark.parametrize("ids_BL", [MIXED, IMAGES], ids=["mixed", "images"])
@pytest.mark.parametrize("with_indices", [False, True], ids=["computed", "carried"])
def test_visual_rows_and_levels_stand_in_reading_order(ids_BL, with_indices):
    embedding, args = build(), visual_args(ids_BL)
    outputs = embedding(args | (carried(ids_BL) if with_indices else {}))
    visual = np.isin(ids_BL, (IMAGE, VIDEO)).reshape(-1)
    hidden = outputs["hidden_states"].numpy()
    wanted = reading_order(ids_BL, args, "image_embeds", "video_embeds")
    assert (hidden[visual] == wanted).all()
    words = embedding.embed_tokens.weight.numpy()[ids_BL.reshape(-1)]
    assert (hidden[~visual] == words[~visual]).all()
    for g, level in enumerate(outputs["deepstack_visual_emb"]):
        wanted = reading_order(ids_BL, args, "deepstack_image_embeds", "deepstack_video_embeds", g)
        assert (level.numpy() == wanted).all()
    assert outputs["visual_pos_masks"].numpy().reshape(-1).tolist() == visual.tolist()
    assert outputs["visual_update_indices"].numpy().tolist() == np.flatnonzero(visual).tolist()


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("ids_BL", [MIXED, IMAGES], ids=["mixed", "images"])
@pytest.mark.parametrize("with_indices", [False, True], ids=["computed", "carried"])
def test_every_rank_holds_its_rows_of_the_whole(size, ids_BL, with_indices, monkeypatch):
    # The global rank may differ from the mp rank.
    monkeypatch.setenv("PADDLE_TRAINER_ID", "5")
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "16")
    args = visual_args(ids_BL)
    whole = build()(args)
    rows = ids_BL.size // size
    for rank in range(size):
        placement = MockedSequenceParallel(rank, size)
        part = carried(ids_BL, placement.ops.row_part) if with_indices else {}
        outputs = build(placement)(args | part)
        mine = slice(rank * rows, (rank + 1) * rows)
        wanted_rows = whole["hidden_states"].numpy()[mine]
        assert (outputs["hidden_states"].numpy() == wanted_rows).all()
        update = outputs["visual_update_indices"].numpy()
        assert outputs["visual_update_indices"].dtype == paddle.int64
        for g in range(LEVELS):
            found, wanted = np.zeros((2, rows, WIDTH)), np.zeros((ids_BL.size, WIDTH))
            wanted[whole["visual_update_indices"].numpy()] = whole["deepstack_visual_emb"][g]
            found[0][update] = outputs["deepstack_visual_emb"][g].numpy()
            assert (found[0] == wanted[mine].astype(np.float32)).all()


def test_a_rank_without_visual_rows_keeps_the_graph_connected():
    ids_BL = token_rows([("image", 4), 1, 2, 3, 4])
    args = visual_args(ids_BL)
    outputs = build(MockedSequenceParallel(1, 2))(args)
    assert outputs["visual_update_indices"].shape == [0]
    (
        outputs["hidden_states"].sum() + sum(x.sum() for x in outputs["deepstack_visual_emb"])
    ).backward()
    for source in (args["image_embeds"], *args["deepstack_image_embeds"]):
        assert (source.grad.numpy() == 0).all()


def test_an_all_text_batch_has_no_visual_entries():
    outputs = build()(visual_args(TEXT))
    assert set(outputs) == {"hidden_states", "position_ids", "rotary_pos_emb"}
    assert outputs["hidden_states"].shape == [TEXT.size, WIDTH]


def test_no_search_and_no_host_read_when_the_batch_carries_indices(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("nonzero on the device")

    for ids_BL in (MIXED, IMAGES, TEXT):
        embedding, args = build(), visual_args(ids_BL) | carried(ids_BL)
        monkeypatch.setattr(paddle, "nonzero", refuse)
        monkeypatch.setattr(paddle.Tensor, "nonzero", refuse)
        with forbid_host_reads():
            embedding(args)
        monkeypatch.undo()


@pytest.mark.parametrize("ids_BL", [MIXED, IMAGES, TEXT], ids=["mixed", "images", "text"])
def test_computing_the_indices_neither_reads_nor_searches_with_all_rows_on_one_rank(ids_BL):
    embedding, args = build(), visual_args(ids_BL)
    with forbid_host_reads(shapes=True):
        outputs = embedding(args)
    assert ("visual_update_indices" in outputs) == (ids_BL is not TEXT)
