"""The key-value cache of one layer.

Guarantees: appended values lie in order in the buffers, also after these grow, and zeros behind
them; a step writes in place; there is never more room than for the keys that there can be.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.families.qwen3_vl.decoder import KeyValueCache


@pytest.fixture
def chunk(monkeypatch) -> None:
    monkeypatch.setattr(KeyValueCache, "CHUNK", 4)


def random_pair(length: int, rng: np.random.Generator) -> tuple[paddle.Tensor, paddle.Tensor]:
    key, value = rng.normal(size=(2, 2, length, 3, 5)).astype(np.float32)
    return paddle.to_tensor(key), paddle.to_tensor(value)


@pytest.mark.parametrize("has_views", [False, True])
def test_appended_pairs_lie_in_order_whatever_the_chunk(chunk, has_views):
    paddle.set_flags({"FLAGS_use_stride_kernel": has_views})
    cache, rng = KeyValueCache(), np.random.default_rng(0)
    every = ([], [])
    for length in (3, 1, 1, 2, 9, 1):
        pair = random_pair(length, rng)
        buffers = cache.append(*pair)
        for arrays, new_BLKH, buffer_BKCH in zip(every, pair, buffers, strict=True):
            arrays.append(new_BLKH.numpy())
            found_BCKH = buffer_BKCH.numpy().transpose(0, 2, 1, 3)
            wanted_BSKH = np.concatenate(arrays, axis=1)
            np.testing.assert_array_equal(found_BCKH[:, : cache.length], wanted_BSKH)
            assert not found_BCKH[:, cache.length :].any()
    assert cache.length == 17


def test_a_step_within_the_capacity_keeps_the_buffers(chunk):
    cache, rng = KeyValueCache(), np.random.default_rng(0)
    cache.append(*random_pair(5, rng))
    addresses = [[x.data_ptr() for x in cache.append(*random_pair(1, rng))] for _ in range(5)]
    assert addresses[0] == addresses[1] == addresses[2] == addresses[3]
    assert addresses[4] != addresses[3]


def test_room_is_made_for_the_whole_prompt_and_for_no_key_that_never_comes(chunk):
    rng = np.random.default_rng(0)
    cache = KeyValueCache(prompt=20, most=22)
    sizes = [cache.append(*random_pair(n, rng))[0].shape[2] for n in (7, 7, 6, 1, 1)]
    assert sizes == [22] * 5
    assert KeyValueCache(prompt=20, most=99).append(*random_pair(7, rng))[0].shape[2] == 24
