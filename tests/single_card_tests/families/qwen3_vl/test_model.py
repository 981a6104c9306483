"""A forward call of the model of either family."""

from functools import partial

import numpy as np
import pytest

from paddle_vl.batch.visual_index import host_visual_indices
from paddle_vl.testing import EXPERTS_3_5, tiny_qwen3_5
from paddle_vl.testing.qwen3_vl import IMAGE, VIDEO, patches, token_rows
from tests.support.tiny import tiny_model

ROWS = ([1, 9, ("image", 4), 2, 5, 7], [4, ("image", 2), 6])
GRIDS = [[1, 4, 4], [1, 2, 4]]
BUILDS = {
    "qwen3_vl": tiny_model,
    "qwen3_5": tiny_qwen3_5,
    "qwen3_5 experts": partial(tiny_qwen3_5, **EXPERTS_3_5),
}


def padded(left: bool) -> dict:
    pixels, grid = patches(GRIDS)
    right = token_rows(*ROWS)
    ids, mask, labels = np.zeros_like(right), np.zeros_like(right), np.full_like(right, -100)
    for b, row in enumerate(ROWS):
        n = len(token_rows(row)[0])
        where = slice(right.shape[1] - n, None) if left else slice(0, n)
        ids[b, where], mask[b, where] = right[b, :n], 1
        labels[b, where] = np.where(right[b, :n] == IMAGE, -100, right[b, :n])
        labels[b, where.start] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels,
            "pixel_values": pixels, "image_grid_thw": grid}  # fmt: skip


def gradients(model, batch) -> tuple[float, dict]:
    loss = model(**batch).loss
    loss.backward()
    found = {name: p.grad.numpy() for name, p in model.hf_named_parameters() if p.grad is not None}
    model.clear_gradients()
    return loss.item(), found


def assert_same_gradients(first: dict, second: dict):
    assert first.keys() == second.keys()
    for name, grad in first.items():
        largest = np.abs(grad).max()
        np.testing.assert_allclose(second[name], grad, atol=2e-5 * largest, err_msg=name)


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_padding_on_either_side_gives_the_same_loss_and_gradients(build):
    model = build()
    loss_right, right = gradients(model, padded(left=False))
    loss_left, left = gradients(model, padded(left=True))
    assert loss_left == pytest.approx(loss_right, abs=2e-6)
    assert_same_gradients(right, left)


def test_right_padding_needs_no_mask():
    model, batch = tiny_model(), padded(left=False)
    loss_masked, masked = gradients(model, batch)
    loss_plain, plain = gradients(model, batch | {"has_left_padding": False})
    assert loss_plain == pytest.approx(loss_masked, abs=2e-6)
    assert_same_gradients(masked, plain)


def test_the_collators_extras_change_nothing():
    model, batch = tiny_model(), padded(left=False)
    position_ids, _ = model.position_ids(
        batch["input_ids"], batch["attention_mask"], batch["image_grid_thw"]
    )
    extras = {
        "position_ids": position_ids,
        "num_target_tokens": int((batch["labels"][:, 1:] != -100).sum()),
        **host_visual_indices(
            batch["input_ids"], image_token_id=IMAGE, video_token_id=VIDEO, num_image_rows=6
        ),
    }
    assert model(**batch, **extras).loss.item() == model(**batch).loss.item()


def test_images_and_videos_in_one_batch_equal_each_alone():
    model = tiny_model()
    image_pixels, image_grid = patches([[1, 4, 4], [1, 2, 2]])
    video_pixels, video_grid = patches([[2, 2, 4]], seed=1)
    ids = token_rows([1, ("video", 2), 3, ("video", 2), 2, ("image", 4)], [4, ("image", 1), 5])
    together = model(
        input_ids=ids, pixel_values=image_pixels, image_grid_thw=image_grid,
        pixel_values_videos=video_pixels, video_grid_thw=video_grid,
    ).logits.numpy()  # fmt: skip
    alone = model(
        input_ids=token_rows([4, ("image", 1), 5]), pixel_values=image_pixels[16:],
        image_grid_thw=image_grid[1:],
    ).logits.numpy()  # fmt: skip
    np.testing.assert_allclose(together[1, :3], alone[0], atol=1e-5)
    # Up to its image, the first sample is a complete video sample.
    only_video = model(
        input_ids=token_rows([1, ("video", 2), 3, ("video", 2), 2]),
        pixel_values_videos=video_pixels, video_grid_thw=video_grid,
    ).logits.numpy()  # fmt: skip
    np.testing.assert_allclose(together[0, :7], only_video[0], atol=1e-5)


def test_a_text_only_batch_leaves_the_tower_without_gradients():
    model = tiny_model()
    ids = token_rows([1, 2, 3], [4, 5, 6])
    _, found = gradients(model, {"input_ids": ids, "labels": ids})
    assert not [name for name in found if name.startswith("model.visual.")]
    assert "lm_head.weight" in found


def test_loss_is_the_mean_over_targets_and_0_without_any():
    model, batch = tiny_model(), padded(left=False)
    output = model(**batch)
    count = int((batch["labels"][:, 1:] != -100).sum())
    assert int(output.num_target_tokens) == count
    assert output.loss.item() == pytest.approx(output.loss_sum.item() / count, rel=1e-6)
    batch["labels"] = np.full_like(batch["labels"], -100)
    assert model(**batch).loss.item() == 0.0


PATCHES_DIFFER = "24 patches but image_grid_thw .* describes"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_grid_thw": None}, "has pixel_values without image_grid_thw"),
        ({"pixel_values": None}, "has image_grid_thw without pixel_values"),
        ({"image_grid_thw": np.array([[1, 4, 4]])}, f"{PATCHES_DIFFER} 16"),
        ({"image_grid_thw": np.array([[1, 4, 4], [1, 2, 3]])}, f"{PATCHES_DIFFER} 22"),
    ],
)
def test_media_that_do_not_agree_are_refused(change, message):
    batch = padded(left=False)
    positions, _ = tiny_model().position_ids(
        batch["input_ids"], batch["attention_mask"], batch["image_grid_thw"]
    )
    with pytest.raises(ValueError, match=message):
        tiny_model()(**(batch | {"position_ids": positions} | change))
