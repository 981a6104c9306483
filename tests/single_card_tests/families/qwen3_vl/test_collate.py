"""Collator: the batch equals a plain loop over samples and tokens, which shares no code with it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_vl.families.vlm.inputs.collate import PackedCollator, VLCollator

PAD, IMAGE, VIDEO, START = 90, 91, 92, 93
MERGE = 2


def collator(**options) -> VLCollator:
    return VLCollator(pad_token_id=PAD, image_token_id=IMAGE, video_token_id=VIDEO, **options)


def make_sample(runs: list, seed: int = 0) -> dict:
    """A sample from runs: an int is that many text tokens, a pair (h, w) an image with that grid in
    merged tokens, a triple (t, h, w) a video."""
    rng = np.random.default_rng(seed)
    ids, grids = [1], {IMAGE: [], VIDEO: []}
    for run in runs:
        if isinstance(run, int):
            ids += rng.integers(2, 80, run).tolist()
        else:
            token = IMAGE if len(run) == 2 else VIDEO
            t, h, w = run if len(run) == 3 else (1, *run)
            for _ in range(t):
                ids += [START] + [token] * (h * w) + [5]
            grids[token].append([t, h * MERGE, w * MERGE])
    ids = np.array(ids, dtype=np.int64)
    labels = np.where((rng.random(ids.size) < 0.5) & (ids < 80), ids, -100)
    sample = {"input_ids": ids, "labels": labels}
    for token, pixels, grid in (
        (IMAGE, "pixel_values", "image_grid_thw"),
        (VIDEO, "pixel_values_videos", "video_grid_thw"),
    ):
        if grids[token]:
            sample[grid] = np.array(grids[token], dtype=np.int64)
            count = sample[grid].prod(axis=1).sum()
            sample[pixels] = rng.normal(size=(count, 6)).astype(np.float32)
    return sample


def positions_by_loop(ids: list, frames: dict) -> list:
    """(t, h, w) position of every token, computed one by one."""
    positions, p, at = [], 0, 0
    while at < len(ids):
        if ids[at] in frames:
            h, w = frames[ids[at]].pop(0)
            positions += [(p, p + y, p + x) for y in range(h) for x in range(w)]
            p, at = p + max(h, w), at + h * w
        else:
            positions.append((p, p, p))
            p, at = p + 1, at + 1
    return positions


def check_against_loops(samples: list, batch: dict, side: str, length: int) -> None:
    visual_rows, order, targets = [], [], 0
    order_of = {IMAGE: 0, VIDEO: sum(np.count_nonzero(s["input_ids"] == IMAGE) for s in samples)}
    for b, sample in enumerate(samples):
        ids = sample["input_ids"].tolist()
        frames = {IMAGE: [], VIDEO: []}
        for token, key in ((IMAGE, "image_grid_thw"), (VIDEO, "video_grid_thw")):
            for t, h, w in sample.get(key, ()):
                frames[token] += [(h // MERGE, w // MERGE)] * t
        positions = positions_by_loop(ids, frames)
        first = length - len(ids) if side == "left" else 0
        for at in range(length):
            own = at - first
            is_real = 0 <= own < len(ids)
            assert batch["attention_mask"][b, at] == is_real
            assert batch["input_ids"][b, at] == (ids[own] if is_real else PAD)
            assert batch["labels"][b, at] == (sample["labels"][own] if is_real else -100)
            expected = positions[own] if is_real else (0, 0, 0)
            assert tuple(batch["position_ids"][:, b, at]) == expected
            targets += is_real and at > 0 and sample["labels"][own] != -100
            if is_real and ids[own] in order_of:
                visual_rows.append(b * length + at)
                order.append(order_of[ids[own]])
                order_of[ids[own]] += 1
    assert batch["num_target_tokens"] == targets
    assert batch["visual_update_indices"].tolist() == visual_rows
    assert batch["visual_gather_indices"].tolist() == list(range(len(visual_rows)))
    if "visual_source_indices" in batch:
        assert batch["visual_source_indices"].tolist() == order


RUNS = st.lists(
    st.integers(1, 5)
    | st.tuples(st.integers(1, 3), st.integers(1, 3))
    | st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(
    samples=st.lists(RUNS, min_size=1, max_size=4),
    side=st.sampled_from(["left", "right"]),
    multiple=st.sampled_from([1, 4, 7]),
)
def test_batch_equals_a_plain_loop(samples, side, multiple):
    samples = [make_sample(runs, seed) for seed, runs in enumerate(samples)]
    batch = collator(padding_side=side, pad_to_multiple_of=multiple)(samples)
    longest = max(len(sample["input_ids"]) for sample in samples)
    length = next(n for n in range(longest, longest + multiple) if n % multiple == 0)
    assert batch["input_ids"].shape == (len(samples), length)
    check_against_loops(samples, batch, side, length)
    for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        present = [sample[key] for sample in samples if key in sample]
        assert (key in batch) == bool(present)
        if present:
            np.testing.assert_array_equal(batch[key], np.concatenate(present))
    has_padding = any(len(sample["input_ids"]) < length for sample in samples)
    assert batch["has_left_padding"] is (side == "left" and has_padding)
    both = "pixel_values" in batch and "pixel_values_videos" in batch
    assert ("visual_source_indices" in batch) == both


def test_length_that_ranks_cannot_share_names_numbers_and_setting():
    with pytest.raises(ValueError, match=r"5 token rows.*degree 4.*data\.pad_to_multiple_of"):
        collator(num_parts=4)([make_sample([4])])


def test_placeholders_without_pixels_are_refused():
    sample = make_sample([(2, 2)])
    del sample["pixel_values"], sample["image_grid_thw"]
    with pytest.raises(ValueError, match="4 image placeholder tokens.*0 image"):
        collator()([sample])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(RUNS, max_size=3), min_size=1, max_size=3),
    multiple=st.sampled_from([1, 4, 7]),
)
def test_packed_rows_hold_what_the_samples_alone_do(rows, multiple):
    rows = [[make_sample(runs, seed) for seed, runs in enumerate(row)] for row in rows]
    batch = PackedCollator(collator(pad_to_multiple_of=multiple))(rows)
    length = batch["input_ids"].shape[1]
    assert length % multiple == 0
    assert length - multiple < max(1, *(sum(len(s["input_ids"]) for s in row) for row in rows))
    offsets, targets, expected = batch["cu_seqlens"], 0, [0]
    assert offsets.dtype == np.int32
    for b, row in enumerate(rows):
        at = 0
        for sample in row:
            alone = collator()([sample])
            here = slice(at, at + len(sample["input_ids"]))
            for key in ("input_ids", "attention_mask"):
                np.testing.assert_array_equal(batch[key][b, here], alone[key][0])
            np.testing.assert_array_equal(batch["labels"][b, here][1:], sample["labels"][1:])
            assert batch["labels"][b, at] == -100
            np.testing.assert_array_equal(
                batch["position_ids"][:, b, here], alone["position_ids"][:, 0]
            )
            targets += alone["num_target_tokens"]
            at = here.stop
            expected.append(b * length + at)
        if at < length:
            expected.append((b + 1) * length)
        assert not batch["attention_mask"][b, at:].any()
        assert (batch["labels"][b, at:] == -100).all()
    assert offsets.tolist() == expected
    assert batch["num_target_tokens"] == targets
    for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        present = [sample[key] for row in rows for sample in row if key in sample]
        assert (key in batch) == bool(present)
        if present:
            np.testing.assert_array_equal(batch[key], np.concatenate(present))


@pytest.mark.parametrize("side", ["left", "right"])
def test_real_rows_are_listed_for_a_model_with_experts(side):
    samples = [make_sample([n], seed=n) for n in (2, 5, 1)]
    batch = collator(padding_side=side, pad_to_multiple_of=8, lists_real_rows=True)(samples)
    wanted = [
        i * 8 + place
        for i, sample in enumerate(samples)
        for place in (range(8) if side == "right" else range(8 - len(sample["input_ids"]), 8))
        if side == "left" or place < len(sample["input_ids"])
    ]
    assert batch["real_row_indices"].tolist() == wanted
    assert batch["real_row_indices"].dtype == np.int64
    assert "real_row_indices" not in collator()(samples)
    packed = PackedCollator(collator(pad_to_multiple_of=8, lists_real_rows=True))
    # Three, six and two tokens: a row of nine with a tail, one of two, and an empty one.
    found = packed([samples[:2], samples[2:], []])["real_row_indices"].tolist()
    assert found == [*range(9), 16, 17]
