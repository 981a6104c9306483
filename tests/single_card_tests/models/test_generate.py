"""Greedy decoding with a key-value cache.

Pinned here: cached steps equal a full forward over the grown sequence; a left-padded row answers as
it does alone; rows end at their stop token; errors for prompts that cannot continue.
"""

import numpy as np
import paddle
import pytest

from tests.tiny import patches, tiny_model, token_rows

GRIDS = [[1, 4, 4], [1, 2, 4]]


def greedy_without_cache(model, ids, pixels, grid, steps):
    for _ in range(steps):
        with paddle.no_grad():
            logits = model(input_ids=ids, pixel_values=pixels, image_grid_thw=grid).logits
        ids = np.concatenate([ids, logits[:, -1].argmax(axis=-1).numpy()[:, None]], axis=1)
    return ids[:, -steps:]


def test_cached_decoding_equals_a_full_forward_each_step():
    model, (pixels, grid) = tiny_model(), patches(GRIDS)
    ids = token_rows([1, ("image", 4), 2, ("image", 2), 3])
    found = model.generate(
        input_ids=ids, pixel_values=pixels, image_grid_thw=grid, max_new_tokens=6, eos_token_ids=[]
    )
    assert found.tolist() == greedy_without_cache(model, ids, pixels, grid, 6).tolist()


def test_a_left_padded_row_answers_as_it_does_alone():
    model, (pixels, grid) = tiny_model(), patches(GRIDS)
    rows = [token_rows([1, 9, ("image", 4), 2, 5, 7]), token_rows([4, ("image", 2), 6])]
    length = rows[0].shape[1]
    ids, mask = np.zeros((2, length), np.int64), np.zeros((2, length), np.int64)
    for b, row in enumerate(rows):
        ids[b, length - row.shape[1] :], mask[b, length - row.shape[1] :] = row, 1
    together = model.generate(
        input_ids=ids, attention_mask=mask, pixel_values=pixels, image_grid_thw=grid,
        max_new_tokens=5, eos_token_ids=[],
    )  # fmt: skip
    pixel_parts = (pixels[:16], pixels[16:])
    for b, row in enumerate(rows):
        alone = model.generate(
            input_ids=row, pixel_values=pixel_parts[b], image_grid_thw=grid[b : b + 1],
            max_new_tokens=5, eos_token_ids=[],
        )  # fmt: skip
        assert together[b].tolist() == alone[0].tolist()


def test_a_row_ends_at_a_stop_token_and_is_filled_with_the_first():
    model, ids = tiny_model(), token_rows([1, 2, 3], [7, 8, 9])
    free = model.generate(input_ids=ids, max_new_tokens=4, eos_token_ids=[])
    stop = int(free[0, 1])
    found = model.generate(input_ids=ids, max_new_tokens=4, eos_token_ids=[50, stop])
    first = free[0].tolist().index(stop)
    assert found[0, : first + 1].tolist() == free[0, : first + 1].tolist()
    assert set(found[0, first + 1 :].tolist()) <= {50}
    held = model.generate(input_ids=ids, max_new_tokens=4, eos_token_ids=[stop], min_new_tokens=4)
    assert stop not in held


def test_the_tower_runs_once():
    model, (pixels, grid) = tiny_model(), patches(GRIDS[:1])
    calls = []
    model.visual.register_forward_post_hook(lambda *_: calls.append(1))
    model.generate(
        input_ids=token_rows([1, ("image", 4), 2]), pixel_values=pixels, image_grid_thw=grid,
        max_new_tokens=4, eos_token_ids=[],
    )  # fmt: skip
    assert calls == [1]


def test_training_mode_is_restored():
    model = tiny_model()
    model.train()
    model.generate(input_ids=token_rows([1, 2]), max_new_tokens=2, eos_token_ids=[])
    assert model.training


def test_a_prompt_padded_on_the_right_is_refused():
    mask = np.array([[1, 1], [1, 0]])
    with pytest.raises(ValueError, match=r"prompts \[1\] are padded on the right.*left"):
        tiny_model().generate(
            input_ids=token_rows([1, 2], [3]), attention_mask=mask, max_new_tokens=2,
            eos_token_ids=[],
        )  # fmt: skip


def test_no_room_for_a_token_is_refused():
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        tiny_model().generate(input_ids=token_rows([1]), max_new_tokens=0, eos_token_ids=[])
