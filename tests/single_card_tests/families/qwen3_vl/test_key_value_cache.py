"""The key-value cache of one layer.

Guarantees: appended values come back in order, also after the buffers grow; a step writes in place
and copies no earlier values.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.compat import strided_views
from paddle_vl.families.qwen3_vl.decoder import KeyValueCache


@pytest.fixture
def cache(monkeypatch) -> KeyValueCache:
    monkeypatch.setattr(KeyValueCache, "CHUNK", 4)
    return KeyValueCache()


def random_pair(length: int, rng: np.random.Generator) -> tuple[paddle.Tensor, paddle.Tensor]:
    key, value = rng.normal(size=(2, 2, length, 3, 5)).astype(np.float32)
    return paddle.to_tensor(key), paddle.to_tensor(value)


@pytest.mark.parametrize("has_views", [False, True])
def test_appended_pairs_come_back_in_order_whatever_the_chunk(cache, has_views):
    paddle.set_flags({"FLAGS_use_stride_kernel": has_views})
    rng = np.random.default_rng(0)
    keys, values = [], []
    for length in (3, 1, 1, 2, 9, 1):
        key, value = random_pair(length, rng)
        keys.append(key.numpy())
        values.append(value.numpy())
        all_keys, all_values = cache.append(key, value)
        np.testing.assert_array_equal(all_keys.numpy(), np.concatenate(keys, axis=1))
        np.testing.assert_array_equal(all_values.numpy(), np.concatenate(values, axis=1))
    assert cache.length == 17


def test_a_step_within_the_capacity_keeps_the_buffer(cache):
    rng = np.random.default_rng(0)
    cache.append(*random_pair(5, rng))
    with strided_views():
        addresses = [[x.data_ptr() for x in cache.append(*random_pair(1, rng))] for _ in range(4)]
    assert addresses[0] == addresses[1] == addresses[2]
    assert addresses[3] != addresses[2]
