"""The TypedDicts of batches match what collators make and models take, for every family."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from paddle_vl.batch.schema import Axes, VLBatch
from paddle_vl.config.load import load_run_config
from paddle_vl.families.policy.model_inputs import PlannerBatch, PolicyBatch
from paddle_vl.families.vlm.inputs.collate import PackedCollator, VLCollator, prepared
from paddle_vl.families.vlm.training.objective import empty_batch, with_unused_image
from paddle_vl.nn.placement import SingleDevicePlacement
from paddle_vl.train.build import run_family
from tests.single_card_tests.families.qwen3_vl.test_collate import (
    IMAGE,
    PAD,
    VIDEO,
    make_sample,
)
from tests.single_card_tests.train.tiny_policy_run import PLANNER, write_tiny_policy_run
from tests.support.tiny import tiny_config


def check_batch(batch: Mapping[str, Any], kind: type) -> None:
    """Check that arrays are as declared."""
    hints = get_type_hints(kind, include_extras=True)
    assert isinstance(batch, kind)
    assert set(batch) <= set(hints)
    # Each of pi07's texts has its own length.
    shared = ("B", "L") if kind is VLBatch else ("B", "F", "J", "A", "H", "W")
    sizes: dict[str, int] = {}
    for name, value in batch.items():
        for array, axes in _declared(hints[name], value):
            letters = axes.names.split()
            assert (array.ndim, str(array.dtype)) == (len(letters), axes.dtype), name
            for letter, size in zip(letters, array.shape, strict=True):
                wanted = int(letter) if letter.isdigit() else size
                if letter in shared:
                    wanted = sizes.setdefault(letter, size)
                assert size == wanted, (name, letter)


def _declared(hint: Any, value: Any) -> list[tuple[np.ndarray, Axes]]:
    """Arrays of a field with their axes; none for a plain number."""
    if type(None) in get_args(hint):
        hint = get_args(hint)[0]
    if get_origin(hint) is list:
        return [pair for item in value for pair in _declared(get_args(hint)[0], item)]
    axes = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Axes)]
    return [(value, one) for one in axes]


def vl_batches() -> dict[str, VLBatch]:
    collator = VLCollator(PAD, IMAGE, VIDEO, lists_real_rows=True)
    text, image, both = (make_sample(runs) for runs in ([3], [2, (1, 2)], [(2, 2), (1, 1, 2)]))
    vision = tiny_config().vision_config
    made = {
        "text": collator([text]),
        "images and videos": collator([text, image, both]),
        "packed": PackedCollator(collator)([[text, image], [both]]),
        "idle": empty_batch(4),
    }
    batches = {name: prepared(batch) for name, batch in made.items()}
    return batches | {"unused image": with_unused_image(batches["text"], vision)}


@pytest.mark.parametrize("name", vl_batches())
def test_batches_of_qwen3_vl_are_as_declared(name):
    check_batch(vl_batches()[name], VLBatch)


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory) -> Path:
    return write_tiny_policy_run(tmp_path_factory.mktemp("policy"), num_samples=4)


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [([], PolicyBatch), ([f"model.config={json.dumps(PLANNER)}"], PlannerBatch)],
    ids=["policy", "planner"],
)
def test_batches_of_pi07_are_as_declared(policy_file, overrides, kind):
    family = run_family(load_run_config(policy_file, overrides))
    built = family.build_model(SingleDevicePlacement())
    batch = built.collator([family.train_data[number] for number in range(3)])
    check_batch(batch, kind)
    check_batch(built.adapter.idle_batch(built.model), kind)


def test_a_field_of_another_kind_is_found():
    batch = vl_batches()["text"]
    for broken in (
        {"input_ids": batch.input_ids.astype(np.int32)},
        {"attention_mask": batch.attention_mask[:, :-1]},
    ):
        with pytest.raises(AssertionError):
            check_batch(batch | broken, VLBatch)
    with pytest.raises(TypeError):
        batch | {"unknown": 1}


def test_a_batch_is_a_mapping_of_what_the_model_takes():
    batch = vl_batches()["text"]
    assert {"input_ids", "position_ids"} <= set(batch)
    assert not {"counts", "lengths", "pixel_values"} & set(batch)
    assert "pixel_values" not in batch
    assert (batch | {"position_ids": None}).get("position_ids") is None
    assert (batch.counts, batch.num_samples, batch.num_tokens) == ((1,), 1, 4)


def test_each_array_for_the_device_is_placed_once_under_a_key_of_its_own():
    batch = vl_batches()["images and videos"]
    keys = []
    made = batch.placed(lambda key, array: keys.append(key) or array.shape, 7)
    assert made.image_grid_thw is batch.image_grid_thw
    assert made.input_ids == batch.input_ids.shape
    arrays = {name for name, value in batch.items() if isinstance(value, np.ndarray)}
    assert sorted(keys) == sorted((7, name) for name in arrays - {*batch.on_host})
