"""Visual indices: the rows with visual tokens and the embedding of each.

Guarantees: equality with a plain loop for any mask, shard and layout; NumPy and Paddle agree; all
results are 1-D int64; the shards together give the full result; counts and divisibility are
checked.

The loop states the definition row by row and shares no code with the formula.
"""

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_vl.batch.visual_index import (
    RowPart,
    check_visual_counts,
    compute_visual_indices,
    host_visual_indices,
)
from paddle_vl.testing.qwen3_vl import IMAGE, VIDEO, token_rows

IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
TEXT_IMAGE_VIDEO = st.sampled_from([1, 1, IMAGE, IMAGE, VIDEO])


def plain_loop(ids_BL, part: RowPart, layout: str):
    """Visit the rows one by one and look up every visual token in a reading-order table."""
    batch, length = ids_BL.shape
    reading_order, source, counts = {}, [], {IMAGE: 0, VIDEO: 0}
    num_images = int((ids_BL == IMAGE).sum())
    for b in range(batch):
        for i in range(length):
            token = int(ids_BL[b, i])
            if token in counts:
                reading_order[b, i] = len(reading_order)
                source.append(counts[token] + (num_images if token == VIDEO else 0))
                counts[token] += 1
    rows = [(b, i) for b in range(batch) for i in range(length)]
    if layout == "sequence_first":
        rows = [(b, i) for i in range(length) for b in range(batch)]
    size = len(rows) // part.size
    update, gather = [], []
    for row, place in enumerate(rows[part.rank * size : (part.rank + 1) * size]):
        if place in reading_order:
            update.append(row)
            gather.append(reading_order[place])
    return update, gather, source


def counts_of(ids_BL):
    return {"num_image_rows": int((ids_BL == IMAGE).sum()),
            "num_video_rows": int((ids_BL == VIDEO).sum())}  # fmt: skip


@st.composite
def masked_parts(draw):
    size = draw(st.sampled_from([1, 2, 4, 8]))
    batch = draw(st.integers(1, 4))
    length = draw(st.integers(1, 4)) * size
    tokens = draw(st.lists(TEXT_IMAGE_VIDEO, min_size=batch * length, max_size=batch * length))
    ids_BL = np.array(tokens, dtype=np.int64).reshape(batch, length)
    return ids_BL, RowPart(draw(st.integers(0, size - 1)), size)


@settings(deadline=None, max_examples=150)
@given(masked_parts(), st.sampled_from(["token_rows", "sequence_first"]))
def test_indices_equal_a_plain_loop(case, layout):
    ids_BL, part = case
    found = host_visual_indices(ids_BL, part=part, layout=layout, **counts_of(ids_BL), **IDS)
    update, gather, source = plain_loop(ids_BL, part, layout)
    assert found["visual_update_indices"].tolist() == update
    assert found["visual_gather_indices"].tolist() == gather
    both = (ids_BL == IMAGE).any() and (ids_BL == VIDEO).any()
    assert ("visual_source_indices" in found) == both
    if both:
        assert found["visual_source_indices"].tolist() == source


@settings(deadline=None, max_examples=40)
@given(masked_parts(), st.sampled_from(["token_rows", "sequence_first"]))
def test_paddle_and_numpy_give_the_same_arrays(case, layout):
    ids_BL, part = case
    ids = paddle.to_tensor(ids_BL)
    traced = compute_visual_indices(
        ids == IMAGE,
        ids == VIDEO,
        nonzero=lambda mask: paddle.nonzero(mask).reshape([-1]),
        part=part,
        layout=layout,
    )
    host = compute_visual_indices(
        ids_BL == IMAGE, ids_BL == VIDEO, nonzero=np.flatnonzero, part=part, layout=layout
    )
    for tensor, array in zip(traced, host, strict=True):
        assert tensor.dtype == paddle.int64
        assert array.dtype == np.int64
        assert tensor.numpy().tolist() == array.tolist()
        assert array.ndim == 1


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_parts_of_all_ranks_cover_every_visual_row_once(size):
    ids_BL = token_rows([1, ("image", 9), 2], [("video", 5), 1, 1, ("image", 3)], length=16)
    whole = host_visual_indices(ids_BL, **counts_of(ids_BL), **IDS)
    rows, embeddings = [], []
    for rank in range(size):
        part = RowPart(rank, size)
        found = host_visual_indices(ids_BL, part=part, **counts_of(ids_BL), **IDS)
        start, _ = part.bounds(ids_BL.size)
        rows += (found["visual_update_indices"] + start).tolist()
        embeddings += found["visual_gather_indices"].tolist()
    assert rows == whole["visual_update_indices"].tolist()
    assert embeddings == whole["visual_gather_indices"].tolist()


def test_gather_is_a_contiguous_range_in_token_rows_and_not_in_sequence_first():
    ids_BL = token_rows([1, ("image", 3)], [("image", 2), 1, 1])
    rows = host_visual_indices(ids_BL, num_image_rows=5, **IDS)["visual_gather_indices"]
    sequence = host_visual_indices(ids_BL, num_image_rows=5, layout="sequence_first", **IDS)
    assert rows.tolist() == [0, 1, 2, 3, 4]
    assert sequence["visual_gather_indices"].tolist() == [3, 0, 4, 1, 2]


def test_a_rank_without_visual_rows_gets_empty_arrays():
    ids_BL = token_rows([("image", 4), 1, 1, 1, 1])
    found = host_visual_indices(ids_BL, num_image_rows=4, part=RowPart(1, 2), **IDS)
    for array in found.values():
        assert array.shape == (0,)
        assert array.dtype == np.int64


def test_an_all_text_batch_carries_empty_arrays():
    found = host_visual_indices(token_rows([1, 2, 3]), **IDS)
    assert {name: array.size for name, array in found.items()} == {
        "visual_update_indices": 0,
        "visual_gather_indices": 0,
    }


def test_rows_that_the_degree_does_not_divide_name_both_numbers_and_the_setting():
    with pytest.raises(ValueError, match=r"6 token rows.*degree 4.*data\.pad_to_multiple_of"):
        host_visual_indices(token_rows([1] * 6), part=RowPart(0, 4), **IDS)


def test_counts_that_differ_are_named_for_each_modality():
    with pytest.raises(ValueError, match=r"3 image placeholder.*2 image.*1 video.*4 video"):
        check_visual_counts(3, 2, 1, 4)
    with pytest.raises(ValueError, match="2 image placeholder tokens in input_ids but 3 image"):
        host_visual_indices(token_rows([("image", 2)]), num_image_rows=3, **IDS)


def test_a_rank_outside_its_group_is_refused():
    with pytest.raises(ValueError, match=r"rank 4, outside \[0, 4\)"):
        RowPart(4, 4).bounds(8)


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="'token_rows' or 'sequence_first'"):
        host_visual_indices(token_rows([("image", 2)]), num_image_rows=2, layout="bsh", **IDS)
