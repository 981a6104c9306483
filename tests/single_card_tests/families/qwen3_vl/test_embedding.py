"""GPTEmbedding: visual embeddings in their rows, indices once per step, rows of each mp rank.

Guarantees: the returned dictionary; equal rows whether the batch carries indices or they are
computed; every mp rank's rows equal its shard of the full result; no search when indices are given;
no host read; a traced program works; errors. The oracle of the parallel cases is the unsharded path
on the same batch.

Deepstack levels in the decoder.

Guarantees: levels are added on visual rows only; the decoder reads nothing on the host.
"""

import numpy as np
import paddle
import pytest
from paddle.static import InputSpec

from paddle_vl.export import tracing as _tracing  # noqa: F401  Excepts code from conversion.
from paddle_vl.families.vlm.modeling.call_arguments import called_batch
from paddle_vl.families.vlm.modeling.layers import DeepstackLayer
from paddle_vl.testing import MockedSequenceParallel, forbid_host_reads
from paddle_vl.testing.qwen3_vl import IMAGE, VIDEO, patches, token_rows
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
from tests.support.tiny import tiny_model


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


def test_gradients_of_all_ranks_sum_to_the_whole():
    def gradients(placement):
        args = visual_args(MIXED)
        outputs = build(placement)(args)
        weight = paddle.arange(1, WIDTH + 1, dtype="float32")
        total = (outputs["hidden_states"] * weight).sum()
        for g, level in enumerate(outputs["deepstack_visual_emb"]):
            total = total + (g + 2) * (level * weight).sum()
        total.backward()
        sources = [args[f"{kind}_embeds"] for kind in ("image", "video")]
        sources += args["deepstack_image_embeds"] + args["deepstack_video_embeds"]
        return [source.grad.numpy() for source in sources]

    parts = [gradients(MockedSequenceParallel(rank, 4)) for rank in range(4)]
    for whole, *pieces in zip(gradients(None), *parts, strict=True):
        np.testing.assert_allclose(sum(pieces), whole)


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


@pytest.mark.parametrize("ids_BL", [MIXED, IMAGES, TEXT], ids=["mixed", "images", "text"])
def test_computing_the_indices_of_a_shard_searches_its_rows_alone(ids_BL, monkeypatch):
    searched, nonzero = [], paddle.nonzero
    monkeypatch.setattr(paddle, "nonzero", lambda x: searched.append(x.shape) or nonzero(x))
    embedding, args = build(MockedSequenceParallel(1, 4)), visual_args(ids_BL)
    with forbid_host_reads():
        embedding(args)
    assert searched == ([] if ids_BL is TEXT else [[ids_BL.size // 4]])


def test_decoder_input_takes_the_place_of_embedded_ids():
    ids_BL, embedding = IMAGES, build()
    args = visual_args(ids_BL)
    wanted = embedding(args)["hidden_states"].numpy()
    decoder_input = embedding.embed_tokens(args.pop("input_ids"))
    for given in (decoder_input, decoder_input.reshape([-1, WIDTH])):
        outputs = embedding(args | carried(ids_BL) | {"decoder_input": given})
        assert (outputs["hidden_states"].numpy() == wanted).all()


class Traced(paddle.nn.Layer):
    """A layer with tensors in and tensors out, as tracing requires."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def forward(
        self,
        input_ids,
        position_ids,
        image_embeds,
        level_0,
        level_1,
        video_embeds,
        video_0,
        video_1,
    ):
        outputs = self.embedding(
            {
                "input_ids": input_ids,
                "position_ids": position_ids,
                "image_embeds": image_embeds,
                "deepstack_image_embeds": [level_0, level_1],
                "video_embeds": video_embeds,
                "deepstack_video_embeds": [video_0, video_1],
            }
        )
        return (
            outputs["hidden_states"],
            *outputs["deepstack_visual_emb"],
            outputs["visual_update_indices"],
            outputs["visual_gather_indices"],
        )


@pytest.mark.parametrize(
    ("placement", "batch", "length"),
    [
        (None, None, None),
        (MockedSequenceParallel(1, 4), 3, 16),
        (MockedSequenceParallel(1, 4), None, None),
    ],
    ids=["plain-dynamic-shapes", "mp-rank", "mp-rank-dynamic-shapes"],
)
def test_indices_survive_full_graph_tracing(placement, batch, length):
    layer = Traced(build(placement))
    layer.eval()
    rows = [InputSpec([None, WIDTH], "float32", name) for name in "abcdef"]
    traced = paddle.jit.to_static(
        layer,
        full_graph=True,
        input_spec=[
            InputSpec([batch, length], "int64", "input_ids"),
            InputSpec([3, batch, length], "int64", "position_ids"),
            *rows,
        ],
    )
    other = token_rows([("video", 3), 9, ("image", 5)], [1], [("image", 1)], length=16)
    for ids_BL in (MIXED, other):
        args = visual_args(ids_BL)
        inputs = [args["input_ids"], args["position_ids"]]
        inputs += [args["image_embeds"], *args["deepstack_image_embeds"]]
        inputs += [args["video_embeds"], *args["deepstack_video_embeds"]]
        eager = Traced(build(placement))(*inputs)
        for found, wanted in zip(traced(*inputs), eager, strict=True):
            assert found.numpy().tolist() == wanted.numpy().tolist()


GRIDS = [[1, 4, 4], [1, 2, 4]]
IDS = token_rows([1, ("image", 4), 2, 3], [4, 5, ("image", 2), 6])


def batch() -> dict:
    pixels, grid = patches(GRIDS)
    return {"input_ids": IDS, "labels": IDS, "pixel_values": pixels, "image_grid_thw": grid}


def test_a_level_touches_visual_rows_only_and_reaches_the_mergers():
    x = paddle.zeros([6, 2])
    level = paddle.ones([2, 2])
    level.stop_gradient = False
    out = DeepstackLayer()(x, level, paddle.to_tensor([1, 4]))
    assert out.numpy()[:, 0].tolist() == [0, 1, 0, 0, 1, 0]
    (out * 3).sum().backward()
    assert (level.grad.numpy() == 3).all()
    model = tiny_model()
    model(**batch()).loss.backward()
    for merger in model.visual.deepstack_merger_list:
        assert float(merger.linear_fc2.weight.grad.abs().max()) > 0


@pytest.mark.parametrize(
    "read", [lambda x: x.item(), lambda x: x.tolist(), lambda x: x.numpy(), bool, int, float]
)
def test_the_guard_against_host_reads_notices_each_kind(read):
    with forbid_host_reads(), pytest.raises(AssertionError, match="host read"):
        read(paddle.ones([]))


def test_decoder_forward_and_backward_read_nothing_on_the_host():
    model = tiny_model()
    own = called_batch(model.config, model.placement.ops, **batch())
    features = model.encode_visual(own)
    with forbid_host_reads():
        hidden = model.language_model.run(model.language_model.embedding(own, features))
        model.lm_head(hidden).sum().backward()
    assert model.visual.patch_embed.weight.grad is not None
