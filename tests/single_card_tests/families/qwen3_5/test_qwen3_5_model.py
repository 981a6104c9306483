"""The decoder of Qwen3.5 in the ways that a run uses it.

Guarantees: packed samples give loss and gradients of the samples alone, with experts,
recomputation and pipeline stages; padding on the left changes nothing; the prompt in chunks and a
longer prompt with the same end give the same tokens; tensor and sequence parallelism on simulated
ranks equal one device.
"""

import numpy as np
import pytest

from paddle_vl.families.vlm.inputs.collate import PackedCollator, VLCollator
from paddle_vl.families.vlm.pipeline import VLStage
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.testing import (
    EXPERTS_3_5,
    assert_equals_single_device,
    tiny_qwen3_5,
    tiny_qwen3_vl_batch,
)
from paddle_vl.testing.qwen3_vl import IMAGE, VIDEO, patches, token_rows

COLLATOR = VLCollator(0, IMAGE, VIDEO, pad_to_multiple_of=4, lists_real_rows=True)


def sample(items: list, images: list = (), videos: list = ()) -> dict:
    ids = token_rows(items)[0]
    made = {"input_ids": ids, "labels": np.where(ids < 60, ids, -100)}
    # Which padding on the left would predict.
    made["labels"][0] = -100
    if images:
        made["pixel_values"], made["image_grid_thw"] = patches(images, seed=len(items))
    if videos:
        made["pixel_values_videos"], made["video_grid_thw"] = patches(videos, seed=7)
    return made


ROWS = [
    [
        sample([1, ("image", 2), 2, ("video", 1), 3, ("video", 1), 4], [[1, 2, 4]], [[2, 2, 2]]),
        sample([5, 6]),
        sample([8, ("video", 2), 9, ("image", 4), 10], [[1, 4, 4]], [[1, 2, 4]]),
    ],
    # Longer than a chunk of the delta rule.
    [sample([*range(1, 60), *range(1, 20)]), sample([13, 14, 15, 16, 17, 18])],
    [],
]


def assert_gradients(model, other):
    """Every tensor within 1e-5 of its largest entry: sums are rounded in different orders."""
    for (name, a), (_, b) in zip(
        model.hf_named_parameters(), other.hf_named_parameters(), strict=True
    ):
        difference = np.abs(a.grad.numpy() - b.grad.numpy())
        assert difference.max() <= 1e-5 * max(np.abs(b.grad.numpy()).max(), 1e-6), name


@pytest.fixture(scope="module", params=[{}, EXPERTS_3_5], ids=["dense", "experts"])
def text(request) -> dict:
    return request.param


@pytest.fixture(scope="module")
def alone(text):
    """The model after a backward pass of each sample in its own batch, and the loss sum."""
    model, total = tiny_qwen3_5(**text), 0.0
    for one in [each for row in ROWS for each in row]:
        loss = model(**COLLATOR([one])).loss_sum
        loss.backward()
        total += float(loss)
    return model, total


@pytest.fixture
def batch() -> dict:
    return PackedCollator(COLLATOR)(ROWS)


@pytest.mark.parametrize("recomputed", [False, True])
def test_packed_samples_equal_the_samples_alone(alone, text, batch, recomputed):
    model = tiny_qwen3_5(**text)
    if recomputed:
        recompute_layers([*model.vision_blocks, *model.decoder_layers])
    loss = model(**batch).loss_sum
    loss.backward()
    assert float(loss) == pytest.approx(alone[1], rel=1e-6)
    assert_gradients(model, alone[0])


@pytest.mark.parametrize("cut", [1, 2])
def test_parts_of_a_pipeline_equal_the_samples_alone(alone, text, batch, cut):
    model = tiny_qwen3_5(**text)
    rows = VLStage(model, range(cut))(batch)
    later = VLStage(model, range(cut, 3))
    # Hidden states alone travel.
    assert later.input_shape(batch) == tuple(rows.shape) == (batch["input_ids"].size, 16)
    loss = later(batch, rows).loss_sum
    loss.backward()
    assert float(loss) == pytest.approx(alone[1], rel=1e-6)
    assert_gradients(model, alone[0])


def test_padding_on_the_left_changes_nothing(text):
    model = tiny_qwen3_5(**text)
    samples = [each for row in ROWS[:1] for each in row]
    right, left = (VLCollator(0, IMAGE, VIDEO, padding_side=side) for side in ("right", "left"))
    losses = []
    for collator in (right, left):
        output = model(**collator(samples))
        losses.append(float(output.loss_sum))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("size", [1, 3, 64])
def test_a_prompt_in_chunks_gives_the_same_tokens(text, size):
    model, seen = tiny_qwen3_5(**text), []
    pixels, grid = patches([[1, 4, 4]])
    # Longer than a chunk of the delta rule, and a row with padding.
    ids = token_rows([*range(1, 50), ("image", 4), *range(1, 30)], [0] * 61 + [*range(1, 22)])
    prompt = {
        "input_ids": ids, "attention_mask": (ids != 0).astype(np.int64), "pixel_values": pixels,
        "image_grid_thw": grid, "max_new_tokens": 4, "do_sample": False,
    }  # fmt: skip
    for chunk in (None, size):
        logits: list[np.ndarray] = []
        settings = {} if chunk is None else {"prefill_chunk_size": chunk}
        tokens = model.generate(**prompt, **settings, on_logits=logits.append)
        seen.append((tokens, np.stack(logits)))
    np.testing.assert_array_equal(seen[0][0], seen[1][0])
    np.testing.assert_allclose(seen[0][1], seen[1][1], atol=2e-5)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mp_degree", [2, 4])
def test_simulated_ranks_equal_one_device(text, mp_degree, sequence_parallel):
    assert_equals_single_device(
        lambda placement: tiny_qwen3_5(placement, seed=1, **text),
        lambda model: model(**tiny_qwen3_vl_batch()),
        mp_degree,
        sequence_parallel=sequence_parallel,
    )


def test_simulated_ranks_equal_one_device_on_packed_rows(text, batch):
    # Indices of the collator are for all token rows; the model computes those of a rank.
    given = {name: value for name, value in batch.items() if "_indices" not in name}
    assert_equals_single_device(
        lambda placement: tiny_qwen3_5(placement, seed=1, **text),
        lambda model: model(**given),
        2,
    )
