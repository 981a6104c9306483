"""Packed samples in rows of a Qwen3-VL and a Qwen3.5 have the loss and gradients of the samples
alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest

from paddle_vl.families.vlm.inputs.collate import PackedCollator, VLCollator
from paddle_vl.nn.key_value_cache import KeyValueCache
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.testing import EXPERTS_3_5, tiny_qwen3_5
from paddle_vl.testing.qwen3_vl import EXPERTS, IMAGE, VIDEO, patches, token_rows
from tests.support.tiny import tiny_model

COLLATOR = VLCollator(0, IMAGE, VIDEO, pad_to_multiple_of=4, lists_real_rows=True)


def sample(items: list, images: list = (), videos: list = ()) -> dict:
    ids = token_rows(items)[0]
    made = {"input_ids": ids, "labels": np.where(ids < 60, ids, -100)}
    if images:
        made["pixel_values"], made["image_grid_thw"] = patches(images, seed=len(items))
    if videos:
        made["pixel_values_videos"], made["video_grid_thw"] = patches(videos, seed=7)
    return made


ROWS = [
    [
        sample([1, ("image", 2), 2, ("video", 1), 3, ("video", 1), 4], [[1, 2, 4]], [[2, 2, 2]]),
        sample([5, 6, 7]),
        sample([8, ("video", 2), 9, ("image", 4), 10], [[1, 4, 4]], [[1, 2, 4]]),
    ],
    [sample([("image", 1), 11, 12], [[1, 2, 2]]), sample([13, 14, 15, 16, 17, 18])],
    [],
]
# Longer than a chunk of the delta rule.
LONG = [sample([*range(1, 60), *range(1, 20)]), sample([13, 14, 15, 16, 17, 18])]


class Case(NamedTuple):
    """A model, the rows that it gets, and the error allowed of a gradient's largest entry."""

    build: Callable[..., Any]
    text: dict[str, Any]
    rows: list
    tolerance: float


CASES = {
    "qwen3_vl": Case(tiny_model, {}, ROWS, 5e-6),
    "qwen3_vl experts": Case(tiny_model, EXPERTS, ROWS, 5e-6),
    "qwen3_5": Case(tiny_qwen3_5, {}, [ROWS[0], LONG, []], 1e-5),
    "qwen3_5 experts": Case(tiny_qwen3_5, EXPERTS_3_5, [ROWS[0], LONG, []], 1e-5),
}


def assert_gradients(model, other, tolerance: float):
    """Within 1e-6 as one vector, and every tensor within the tolerance of its largest entry: sums
    over samples and over rows are rounded in different orders."""
    square = total = 0.0
    for (name, a), (_, b) in zip(
        model.hf_named_parameters(), other.hf_named_parameters(), strict=True
    ):
        difference = np.abs(a.grad.numpy() - b.grad.numpy())
        scale = np.abs(b.grad.numpy()).max()
        assert difference.max() <= tolerance * max(scale, 1e-6), name
        square += np.square(difference, dtype=np.float64).sum()
        total += np.square(b.grad.numpy(), dtype=np.float64).sum()
    assert square <= 1e-12 * total


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request) -> Case:
    return request.param


@pytest.fixture(scope="module")
def alone(case):
    """The model after a backward pass of each sample in its own batch, and the loss sum."""
    model, total = case.build(**case.text), 0.0
    for one in [each for row in case.rows for each in row]:
        loss = model(**COLLATOR([one])).loss_sum
        loss.backward()
        total += float(loss)
    return model, total


@pytest.fixture
def batch() -> dict:
    return PackedCollator(COLLATOR)(ROWS)


@pytest.mark.parametrize("recomputed", [False, True])
def test_loss_and_gradients_equal_the_samples_alone(alone, case, recomputed):
    model = case.build(**case.text)
    if recomputed:
        recompute_layers([*model.vision_blocks, *model.decoder_layers])
    loss = model(**PackedCollator(COLLATOR)(case.rows)).loss_sum
    loss.backward()
    assert float(loss) == pytest.approx(alone[1], rel=1e-6)
    assert_gradients(model, alone[0], case.tolerance)


def test_the_tail_of_a_row_is_routed_to_no_expert(batch):
    model = tiny_model(**EXPERTS)
    model(**batch)
    real = sum(len(one["input_ids"]) for row in ROWS for one in row)
    assert real == batch["attention_mask"].sum() < batch["input_ids"].size / 2
    assert [int(count.sum()) for count in model.tokens_per_expert().values()] == [2 * real] * 2


def test_four_rows_of_positions_say_the_same_as_offsets(batch):
    model = tiny_model()
    wanted = model(**batch).logits.numpy()
    text = np.concatenate([np.arange(n) for n in np.diff(batch["cu_seqlens"])])
    positions = np.concatenate([text.reshape(1, 3, -1), batch["position_ids"]])
    minimal = {key: batch[key] for key in batch if "pixel" in key or "grid" in key}
    found = model(input_ids=batch["input_ids"], position_ids=positions, **minimal)
    np.testing.assert_array_equal(found.logits.numpy(), wanted)
    tensor = paddle.to_tensor(positions)
    found = model(input_ids=batch["input_ids"], position_ids=tensor, **minimal)
    np.testing.assert_array_equal(found.logits.numpy(), wanted)


def test_restarts_mean_nothing_beside_a_mask():
    model, ids = tiny_model(), token_rows([1, 2, 3, 4])
    three = np.broadcast_to([0, 1, 0, 1], (3, 1, 4))
    four = np.broadcast_to([0, 1, 0, 1], (4, 1, 4))
    mask = np.ones_like(ids)
    wanted = model(ids, attention_mask=mask, position_ids=np.array(three)).logits.numpy()
    found = model(ids, attention_mask=mask, position_ids=np.array(four)).logits.numpy()
    np.testing.assert_array_equal(found, wanted)
    packed = model(ids, position_ids=np.array(four)).logits.numpy()
    assert np.abs(packed[:, 2:] - wanted[:, 2:]).max() > 1e-3


def test_positions_are_computed_from_offsets(batch):
    model = tiny_model()
    wanted = model(**batch).logits.numpy()
    del batch["position_ids"]
    np.testing.assert_array_equal(model(**batch).logits.numpy(), wanted)


def test_offsets_of_another_batch_and_caches_are_refused(batch):
    model = tiny_model()
    with pytest.raises(ValueError, match="crosses token row"):
        model(**batch | {"cu_seqlens": batch["cu_seqlens"][[0, -1]]})
    with pytest.raises(ValueError, match="caches are given but the batch has packed samples"):
        model(**batch, caches=[KeyValueCache() for _ in model.decoder_layers])


def test_rows_without_samples_learn_nothing():
    """A rank may get such rows at the end of an epoch."""
    model, batch = tiny_model(), PackedCollator(COLLATOR)([[], []])
    assert (batch["input_ids"].shape, batch["num_target_tokens"]) == ((2, 4), 0)
    output = model(**batch)
    output.loss.backward()
    assert float(output.loss) == 0.0
    assert not any(p.grad is not None and p.grad.numpy().any() for p in model.parameters())
