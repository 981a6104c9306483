"""A prefill in chunks of columns, with `prefill_chunk_size`, and the key-value cache of one
layer."""

from functools import partial

import numpy as np
import paddle
import pytest

from paddle_vl.nn.attention_masks import MASKED_SCORE
from paddle_vl.nn.dispatch import use_kernels
from paddle_vl.nn.key_value_cache import KeyValueCache
from paddle_vl.testing import EXPERTS_3_5, tiny_qwen3_5
from paddle_vl.testing.qwen3_vl import EXPERTS, patches, token_rows
from tests.support.gpu_stubs.pretended import pretended_gpu
from tests.support.operators import recorded_operators
from tests.support.tiny import tiny_model


def mixed_prompts(more: int = 0) -> dict[str, np.ndarray]:
    """A long row with a video and an image, and a left-padded one with an image at its start; with
    more tokens of text behind both."""
    text = [1 + number % 50 for number in range(more)]
    rows = [
        [1, ("video", 2), 3, ("image", 6), 5, 7, 2, 9, *text],
        [("image", 4), 2, 5, 7, *text],
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


# Further tokens, sizes of chunks and the error allowed. Longer than a chunk of the delta rule.
SHORT = (0, (1, 2, 3, 4, 5, 7, 11, 20), {"rtol": 1e-4, "atol": 1e-6})
LONG = (70, (1, 3, 64), {"atol": 2e-5})


@pytest.mark.parametrize(
    ("build", "more", "sizes", "error"),
    [
        (tiny_model, *SHORT),
        (partial(tiny_model, **EXPERTS), *SHORT),
        (tiny_qwen3_5, *LONG),
        (partial(tiny_qwen3_5, **EXPERTS_3_5), *LONG),
    ],
    ids=["qwen3_vl", "qwen3_vl experts", "qwen3_5", "qwen3_5 experts"],
)
@pytest.mark.parametrize("kernels", ["cpu", "plain"])
def test_a_prefill_in_chunks_gives_the_scores_of_a_whole_one(build, more, sizes, error, kernels):
    """At every border: inside of an image or a video, between them, inside of padding."""
    model, batch = build(), mixed_prompts(more)
    wanted, wanted_scores = answers(model, **batch)
    calls = []
    model.visual.register_forward_post_hook(lambda *_: calls.append("tower"))
    with use_kernels(kernels):
        for size in sizes:
            tokens, scores = answers(model, **batch, prefill_chunk_size=size)
            assert tokens == wanted
            np.testing.assert_allclose(scores, wanted_scores, **error)
    assert len(calls) == len(sizes)


def test_layers_see_one_chunk_at_a_time():
    model, batch, lengths = tiny_model(), mixed_prompts(), []
    model.decoder_layers[0].register_forward_pre_hook(lambda _, x: lengths.append(x[0].shape[0]))
    model.generate(**batch, max_new_tokens=2, prefill_chunk_size=6)
    assert sum(lengths[:-1]) == batch["input_ids"].size
    assert lengths == [12] * (len(lengths) - 2) + [lengths[-2], 2]


@pytest.fixture
def chunk(monkeypatch) -> None:
    monkeypatch.setattr(KeyValueCache, "CHUNK", 4)


def random_pair(length: int, rng: np.random.Generator) -> tuple[paddle.Tensor, paddle.Tensor]:
    key, value = rng.normal(size=(2, 2, length, 3, 5)).astype(np.float32)
    return paddle.to_tensor(key), paddle.to_tensor(value)


@pytest.mark.usefixtures("_views")
@pytest.mark.parametrize("has_views", [False, True])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_appended_pairs_lie_in_order_whatever_the_chunk(chunk, device, has_views):
    paddle.set_flags({"FLAGS_use_stride_kernel": has_views})
    cache, rng = KeyValueCache(), np.random.default_rng(0)
    every = ([], [])
    for length in (3, 1, 1, 2, 9, 1):
        pair = random_pair(length, rng)
        with use_kernels(device):
            buffers = cache.append(*pair)
        for arrays, new_BLKH, buffer_BKCH in zip(every, pair, buffers, strict=True):
            arrays.append(new_BLKH.numpy())
            found_BCKH = buffer_BKCH.numpy().transpose(0, 2, 1, 3)
            wanted_BSKH = np.concatenate(arrays, axis=1)
            np.testing.assert_array_equal(found_BCKH[:, : cache.length], wanted_BSKH)
            assert not found_BCKH[:, cache.length :].any()
    assert cache.length == 17


@pytest.fixture
def _views():
    """Views are not copied, as on a GPU; runs on a CPU turn that off in the whole process."""
    kept = paddle.get_flags("FLAGS_use_stride_kernel")
    paddle.set_flags({"FLAGS_use_stride_kernel": True})
    yield
    paddle.set_flags(kept)


@pytest.mark.usefixtures("_views")
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_step_within_the_capacity_keeps_the_buffers(chunk, device):
    cache, rng = KeyValueCache(), np.random.default_rng(0)
    with use_kernels(device):
        cache.append(*random_pair(5, rng))
        addresses = [[x.data_ptr() for x in cache.append(*random_pair(1, rng))] for _ in range(5)]
    assert addresses[0] == addresses[1] == addresses[2] == addresses[3]
    assert addresses[4] != addresses[3]


@pytest.mark.usefixtures("_views")
@pytest.mark.parametrize("batch", [1, 3], ids=["one prompt", "padded prompts"])
def test_a_token_on_a_gpu_reads_the_keys_where_they_lie(batch):
    """By operators and shapes: one call of flash attention, whose tensors are contiguous, takes the
    keys so far of all prompts; nothing else moves more than the new keys."""
    rng = np.random.default_rng(0)
    past = 40

    def rows(length: int, heads: int = 2) -> paddle.Tensor:
        drawn = rng.normal(size=(batch, length, heads, 8))
        return paddle.to_tensor(drawn.astype(np.float32))

    bias_BS = np.zeros([batch, past + 1], np.float32)
    for number in range(1, batch):
        bias_BS[number, : 3 * number] = MASKED_SCORE
    bias = paddle.to_tensor(bias_BS) if batch > 1 else None
    prompt, token = (rows(past), rows(past)), (rows(1, 4), rows(1), rows(1))
    found = []
    for device in ("cpu", "gpu"):
        cache = KeyValueCache()
        with pretended_gpu() if device == "gpu" else use_kernels(device) as calls:
            cache.append(*prompt)
            with recorded_operators() as operators:
                found.append(cache.attend(*token, cache.mask(1, bias)).numpy())
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)
    (call,) = calls
    assert (call.name, call.copies) == ("flash_attn", 0)
    assert call.shapes[1] == (1, past + 1, 2 * batch, 8)
    # Keys and values of the token, and for all layers at once the mask of padding.
    new = sum(each.new_elements for each in operators if each.name != "flash_attn")
    assert new == (0 if bias is None else bias.size * 4)
    written = [each for each in operators if each.name == "assign_out_"]
    assert [each.arguments[0].size for each in written] == [batch * 2 * 8] * 2
