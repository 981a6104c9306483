"""A prefill in chunks of columns, with `prefill_chunk_size`.

Guarantees: tokens and scores of a whole prefill, wherever the borders lie in images, videos and
padding, with and without experts; the tower runs once, and layers see one chunk at a time.
"""

import numpy as np
import pytest

from paddle_vl.nn.operations import use_kernels
from paddle_vl.testing.qwen3_vl import EXPERTS, patches, token_rows
from tests.support.tiny import tiny_model


def mixed_prompts() -> dict[str, np.ndarray]:
    """A long row with a video and an image, and a left-padded one with an image at its start."""
    rows = [
        [1, ("video", 2), 3, ("image", 6), 5, 7, 2, 9],
        [("image", 4), 2, 5, 7],
    ]
    ids = token_rows(rows[0], rows[1] + [0] * 5)
    ids[1], mask = np.roll(ids[1], 5), np.ones_like(ids)
    mask[1, :5] = 0
    pixels, grid = patches([[1, 4, 6], [1, 4, 4]])
    videos, video_grid = patches([[1, 2, 4]], seed=1)
    return {
        "input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "image_grid_thw": grid,
        "pixel_values_videos": videos, "video_grid_thw": video_grid,
    }  # fmt: skip


def answers(model, **batch) -> tuple[list, np.ndarray]:
    scores = []
    tokens = model.generate(**batch, max_new_tokens=4, on_logits=scores.append)
    return tokens.tolist(), np.stack(scores)


@pytest.mark.parametrize("experts", [{}, EXPERTS])
@pytest.mark.parametrize("kernels", ["cpu", "plain"])
def test_a_prefill_in_chunks_gives_the_scores_of_a_whole_one(experts, kernels):
    """At every border: inside of an image or a video, between them, inside of padding."""
    model, batch = tiny_model(**experts), mixed_prompts()
    wanted, wanted_scores = answers(model, **batch)
    calls = []
    model.visual.register_forward_post_hook(lambda *_: calls.append("tower"))
    with use_kernels(kernels):
        for size in (1, 2, 3, 4, 5, 7, 11, batch["input_ids"].shape[1]):
            tokens, scores = answers(model, **batch, prefill_chunk_size=size)
            assert tokens == wanted
            np.testing.assert_allclose(scores, wanted_scores, rtol=1e-4, atol=1e-6)
    assert len(calls) == 8


def test_layers_see_one_chunk_at_a_time():
    model, batch, lengths = tiny_model(), mixed_prompts(), []
    model.decoder_layers[0].register_forward_pre_hook(lambda _, x: lengths.append(x[0].shape[0]))
    model.generate(**batch, max_new_tokens=2, prefill_chunk_size=6)
    assert sum(lengths[:-1]) == batch["input_ids"].size
    assert lengths == [12] * (len(lengths) - 2) + [lengths[-2], 2]
