"""The patches that a rank's tower takes: each of the batch's by one rank, without a copy if it
can."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_vl.batch.schema import VLBatch
from paddle_vl.families.vlm.inputs.collate import prepared
from paddle_vl.families.vlm.training.own_pixels import PIXELS, with_own_pixels
from paddle_vl.nn.placement import Context, RegionOps
from paddle_vl.parallel.region_ops import SpreadOps
from paddle_vl.testing.qwen3_vl import Image, Video, tiny_qwen3_vl_batch, tiny_qwen3_vl_config

VISION = tiny_qwen3_vl_config().vision_config
ITEMS = (1, Image(4, 4), Video(3, 2, 4), 2, Image(2, 4), Video(2, 4, 4), Image(4, 2), 3)
PLACES = ("patch_coordinates", "patch_tap_rows", "patch_tap_weights")


def batch_of(*sample: Any) -> Any:
    return VLBatch(**{n: x for n, x in tiny_qwen3_vl_batch(sample).items() if n != "labels"})


def ops_of(rank: int, size: int, cp: int = 1, is_collective: bool = False) -> RegionOps:
    context: Any = Context()
    context.size = cp
    return SpreadOps(SimpleNamespace(rank=rank, nranks=size), None, is_collective, context)


def rows_in_order(arrays: list[np.ndarray]) -> list[bytes]:
    return sorted(row.tobytes() for array in arrays for row in array)


@pytest.mark.parametrize(("size", "cp", "sizes"), [(2, 1, (48, 40)), (4, 4, (24, 24, 24, 16))])
def test_patches_and_places_are_those_of_the_batch(size, cp, sizes):
    whole: Any = prepared(tiny_qwen3_vl_batch(ITEMS), VISION)
    whole_patches = np.concatenate([whole[name] for name in PIXELS])
    own: list[Any] = [
        with_own_pixels(whole, VISION, ops_of(rank, size, cp)) for rank in range(size)
    ]
    together = [(np.concatenate([whole_patches, *(whole[name] for name in PLACES)], axis=1))]
    found = [np.concatenate([each[n] for n in ("own_patches", *PLACES)], axis=1) for each in own]
    assert tuple(map(len, found)) == sizes
    assert rows_in_order(found) == rows_in_order(together)
    assert not any(name in each for name in PIXELS for each in own)
    assert all(each.optional_branches == (True,) for each in own)


def test_an_interval_is_not_copied_and_no_item_is_no_patch_or_a_black_row():
    batch = batch_of(1, Image(4, 4), Image(4, 4), 2)
    shared, patches = batch["pixel_values"], []
    for rank in (0, 1):
        patches.append(with_own_pixels(batch, VISION, ops_of(rank, 3))["own_patches"])
        assert np.shares_memory(patches[-1], shared)
    assert np.array_equal(np.concatenate(patches), shared)
    nothing: Any = with_own_pixels(batch, VISION, ops_of(2, 3))
    assert nothing["own_patches"].shape == (0, VISION.patch_dim)
    assert not any(name in nothing for name in PLACES)
    black: Any = with_own_pixels(batch, VISION, ops_of(2, 3, is_collective=True))
    assert [len(black[name]) for name in ("own_patches", *PLACES)] == [4] * 4
    assert not black["own_patches"].any()
