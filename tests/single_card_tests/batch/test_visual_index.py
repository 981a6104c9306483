"""Visual indices: the rows with visual tokens and the embedding of each.

The oracle states the definition row by row and shares no code with the formula.
"""

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle.static import InputSpec

from paddle_vl.batch.row_slices import own_indices
from paddle_vl.batch.schema import VLBatch
from paddle_vl.batch.visual_index import (
    RowPart,
    check_visual_counts,
    checked_values,
    compute_visual_indices,
    host_visual_indices,
)
from paddle_vl.families.vlm.inputs.preference import PreferenceBatch
from paddle_vl.nn.transfer import true_positions
from paddle_vl.testing import forbid_host_reads
from paddle_vl.testing.qwen3_vl import IMAGE, VIDEO, token_rows

IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
LAYOUTS = ["token_rows", "sequence_first", "batch_slices"]
TEXT_IMAGE_VIDEO = st.sampled_from([1, 1, IMAGE, IMAGE, VIDEO])


def nonzero(mask_T):
    return paddle.nonzero(mask_T).reshape([-1])


def sizes_of_shards(num_rows: int, size: int) -> list[int]:
    """Rows of every rank: the first ones have one more where `size` does not divide them."""
    return [num_rows // size + (rank < num_rows % size) for rank in range(size)]


def places_of_rank(batch: int, length: int, part: RowPart, layout: str) -> list[tuple[int, int]]:
    """(sample, position) of each of a rank's rows, sample by sample or position by position."""
    if layout == "batch_slices":
        cut = sizes_of_shards(length, part.size)
        first = sum(cut[: part.rank])
        return [(b, i) for b in range(batch) for i in range(first, first + cut[part.rank])]
    rows = [(b, i) for b in range(batch) for i in range(length)]
    if layout == "sequence_first":
        rows = [(b, i) for i in range(length) for b in range(batch)]
    cut = sizes_of_shards(len(rows), part.size)
    first = sum(cut[: part.rank])
    return rows[first : first + cut[part.rank]]


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
    update, gather = [], []
    for row, place in enumerate(places_of_rank(batch, length, part, layout)):
        if place in reading_order:
            update.append(row)
            gather.append(reading_order[place])
    return update, gather, source


def counts_of(ids_BL):
    return {"num_image_rows": int((ids_BL == IMAGE).sum()),
            "num_video_rows": int((ids_BL == VIDEO).sum())}  # fmt: skip


@st.composite
def masked_parts(draw):
    """Ids of 1 to 4 samples, some without visual tokens, and a rank of 1 to 8; equal shards or not.

    With a remainder a rank may have no row at all.
    """
    size = draw(st.integers(1, 8))
    batch, uneven = draw(st.integers(1, 4)), draw(st.booleans())
    length = draw(st.integers(1, 20)) if uneven else draw(st.integers(1, 4)) * size
    ids_BL = np.ones((batch, length), dtype=np.int64)
    for row in ids_BL:
        if draw(st.booleans()):
            row[:] = draw(st.lists(TEXT_IMAGE_VIDEO, min_size=length, max_size=length))
    return ids_BL, RowPart(draw(st.integers(0, size - 1)), size, uneven)


@settings(deadline=None, max_examples=300)
@given(masked_parts(), st.sampled_from(LAYOUTS))
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


@settings(deadline=None, max_examples=80)
@given(masked_parts(), st.sampled_from(LAYOUTS))
def test_paddle_and_a_known_count_give_the_arrays_of_numpy(case, layout):
    ids_BL, part = case
    ids, count = paddle.to_tensor(ids_BL), int(np.isin(ids_BL, (IMAGE, VIDEO)).sum())
    options = {"part": part, "layout": layout}
    wanted = compute_visual_indices(
        ids_BL == IMAGE, ids_BL == VIDEO, nonzero=np.flatnonzero, **options
    )
    found = compute_visual_indices(ids == IMAGE, ids == VIDEO, nonzero=nonzero, **options)
    options |= {"nonzero": true_positions, "count": count}
    # A known count searches a shard alone.
    with forbid_host_reads(shapes=part.size == 1):
        counted = compute_visual_indices(ids == IMAGE, ids == VIDEO, **options)
    for array, one, other in zip(wanted, found, counted, strict=True):
        assert (array.dtype, array.ndim) == (np.int64, 1)
        assert one.dtype == other.dtype == paddle.int64
        assert one.numpy().tolist() == other.numpy().tolist() == array.tolist()


def on_host(mask_BL):
    return compute_visual_indices(*mask_BL, nonzero=np.flatnonzero)


def on_device(mask_BL):
    tensors = [mask if mask is None else paddle.to_tensor(mask) for mask in mask_BL]
    with checked_values():
        return compute_visual_indices(*tensors, nonzero=nonzero)


@pytest.mark.parametrize("compute", [on_host, on_device])
def test_masks_that_are_none_are_refused(compute):
    image_BL = np.array([[0, 1, 1, 0], [1, 0, 0, 0]], dtype=bool)
    for masks, message in (
        ((image_BL * 2, None), r"image mask has the integers \[0, 2\]"),
        ((image_BL, image_BL * -1), r"video mask has the integers \[-1, 0\]"),
        ((image_BL.astype("float32"), None), r"image mask is float32 .* must be bool"),
        ((image_BL[0], None), r"image mask is bool of shape \[4\]"),
        ((image_BL, ~image_BL[:1]), r"has shape \[2, 4\] but the video mask \[1, 4\]"),
        ((image_BL, image_BL), "3 tokens are of an image and of a video, .* 1 of sample 0"),
    ):
        with pytest.raises(ValueError, match=message):
            compute(masks)
    for found, wanted in zip(compute((image_BL * 1, None)), on_host((image_BL, None)), strict=True):
        np.testing.assert_array_equal(found, wanted)


def traced_indices(part: RowPart, layout: str, shape: list[int | None]):
    """The formula as a program over ids of that shape, in which None is not known."""

    def indices(ids_BL):
        return compute_visual_indices(
            ids_BL == IMAGE, ids_BL == VIDEO, nonzero=nonzero, part=part, layout=layout
        )

    spec = [InputSpec(shape, "int64", "input_ids")]
    return paddle.jit.to_static(indices, full_graph=True, input_spec=spec)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("uneven", [False, True], ids=["equal", "remainder"])
@pytest.mark.parametrize("shape", [(None, None), (None, 12), (3, None)], ids=str)
def test_a_traced_program_without_known_shapes_gives_the_same_arrays(layout, uneven, shape):
    ids_BL = token_rows([1, ("image", 5), 2], [3], [("video", 4), 1, ("image", 3)], length=12)
    longer_BL = np.concatenate([ids_BL, ids_BL[::-1]], axis=1)
    part = RowPart(3, 4, uneven)
    program = traced_indices(part, layout, list(shape))
    batches = [ids_BL]
    if shape[1] is None:
        batches.append(longer_BL[:, :21] if uneven else longer_BL)
    for batch_BL in batches:
        found = program(paddle.to_tensor(batch_BL))
        for array, wanted in zip(found, plain_loop(batch_BL, part, layout), strict=True):
            assert array.dtype == paddle.int64
            assert array.numpy().tolist() == wanted


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", range(1, 9))
def test_the_ranks_together_take_every_embedding_once(size, layout):
    ids_BL = token_rows([1, ("image", 9), 2], [("video", 5), 1, 1, ("image", 3)], length=16)
    parts = [RowPart(rank, size, uneven=True) for rank in range(size)]
    found = [
        host_visual_indices(ids_BL, part=part, layout=layout, **counts_of(ids_BL), **IDS)
        for part in parts
    ]
    if layout == "token_rows":
        indices = host_visual_indices(ids_BL, **counts_of(ids_BL), **IDS)
        within = VLBatch(input_ids=ids_BL, real_row_indices=np.flatnonzero(ids_BL), **indices)
        batch = PreferenceBatch(**within, mismatched_answers=within)
        for part, wanted in zip(parts, found, strict=True):
            own = own_indices(batch, part)
            for name in ("visual_update_indices", "visual_gather_indices"):
                both = own[name].tolist(), own.mismatched_answers[name].tolist()
                assert both == (wanted[name].tolist(),) * 2
            # Experts take all rows of the batch, or those of a part.
            assert own["real_row_indices"].tolist() == batch["real_row_indices"].tolist()
            start, stop = part.bounds(ids_BL.size)
            of_part = own_indices(batch, part, part)["real_row_indices"] + start
            every = batch["real_row_indices"]
            assert of_part.tolist() == every[(every >= start) & (every < stop)].tolist()
    taken = np.concatenate([arrays["visual_gather_indices"] for arrays in found])
    assert sorted(taken.tolist()) == list(range(17))


OF_2: dict = {"num_image_rows": 2}
# Rows of ids, arguments, and what is said.
REFUSED = [
    ([[1] * 6], {"part": RowPart(0, 4)}, r"6 token rows.*degree 4.*data\.pad_to_multiple_of"),
    # The whole batch has 8 rows, but each sample only 2.
    (
        [[1] * 2] * 4, {"part": RowPart(0, 4), "layout": "batch_slices"},
        r"2 tokens of a sample.*degree 4.*uneven=True",
    ),
    ([[("image", 2)]], {"num_image_rows": 3}, "2 image placeholder tokens in input_ids but 3 imag"),
    ([[("image", 2)]], OF_2 | {"layout": "bsh"}, "'sequence_first' or 'batch_slices'"),
    ([[("image", 2)] * 4], {"num_image_rows": 8, "part": RowPart(4, 4)}, r"outside \[0, 4\)"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "arguments", "told"), REFUSED)
def test_what_does_not_fit_is_refused(rows, arguments, told):
    with pytest.raises(ValueError, match=told):
        host_visual_indices(token_rows(*rows), **arguments, **IDS)


def test_counts_that_differ_are_named_for_each_modality():
    with pytest.raises(ValueError, match=r"3 image placeholder.*2 image.*1 video.*4 video"):
        check_visual_counts(3, 2, 1, 4)
