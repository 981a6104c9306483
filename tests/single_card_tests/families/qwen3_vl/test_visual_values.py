"""Visual inputs of GPTEmbedding whose shapes fit and whose values contradict each other.

Guarantees: in the checked mode each is a ValueError that names it; elsewhere nothing is read or
searched with all rows on one rank, and hidden states are NaN; a model that is called with them
refuses them; the checked mode takes what fits.
"""

import numpy as np
import paddle
import pytest

from paddle_vl.batch.visual_index import checked_values
from paddle_vl.testing import MockedSequenceParallel, forbid_host_reads
from paddle_vl.testing.qwen3_vl import (
    IMAGE,
    VIDEO,
    tiny_qwen3_vl,
    tiny_qwen3_vl_batch,
    token_rows,
)
from tests.single_card_tests.families.qwen3_vl.embedding_inputs import (
    IMAGES,
    MIXED,
    TEXT,
    WIDTH,
    build,
    carried,
    masked_args,
    visual_args,
)


def contradictions() -> dict[str, tuple[dict, str]]:
    """Inputs whose shapes fit but whose values contradict each other, and what names it."""
    mixed, images = visual_args(MIXED), visual_args(IMAGES)
    fewer = mixed | {"image_embeds": mixed["image_embeds"][:-1]}
    fewer["deepstack_image_embeds"] = [x[:-1] for x in mixed["deepstack_image_embeds"]]
    more = images | {"image_embeds": paddle.ones([13, WIDTH])}
    more["deepstack_image_embeds"] = [paddle.ones([13, WIDTH])] * 2
    no_videos = {name: value for name, value in mixed.items() if "video" not in name}
    swapped = {"input_ids": paddle.to_tensor(np.where(MIXED == IMAGE, VIDEO, MIXED))}
    masked = masked_args(IMAGES, images)
    mask_BL = masked["visual_pos_masks"]
    return {
        "fewer images": (fewer, "6 image placeholder tokens in input_ids but 5 image"),
        "more images": (more, "12 image placeholder tokens in input_ids but 13 image"),
        "no videos": (no_videos, "6 video placeholder tokens in input_ids but 0 video"),
        "one kind for two": (mixed | swapped, "0 image placeholder .* 12 video placeholder"),
        "empty mask": (
            masked | {"visual_pos_masks": paddle.zeros_like(mask_BL)},
            "0 visual tokens but 12 visual embeddings",
        ),
        "full mask": (
            masked | {"visual_pos_masks": paddle.ones_like(mask_BL)},
            "48 visual tokens but 12 visual embeddings",
        ),
        "mask of another batch, as many tokens": (
            images | {"visual_pos_masks": mask_BL.roll(1, axis=1)},
            "visual_pos_masks differs from the placeholders of input_ids at .* token 1 of sample 0",
        ),
    }


@pytest.mark.parametrize("size", [1, 2], ids=["plain", "mp-rank"])
@pytest.mark.parametrize("name", contradictions())
def test_values_that_contradict_each_other_are_named_in_the_checked_mode_and_nan_elsewhere(
    name, size
):
    args, message = contradictions()[name]
    placement = MockedSequenceParallel(0, size) if size > 1 else None
    with checked_values(), pytest.raises(ValueError, match=message):
        build(placement)(args)
    with forbid_host_reads(shapes=size == 1):
        outputs = build(placement)(args)
    assert outputs["hidden_states"].isnan().all()


def test_a_model_refuses_ids_and_grids_that_contradict_each_other():
    model, batch = tiny_qwen3_vl(), dict(tiny_qwen3_vl_batch())
    batch["position_ids"], _ = model.position_ids(
        batch["input_ids"],
        batch["attention_mask"],
        batch["image_grid_thw"],
        batch["video_grid_thw"],
    )
    assert model(**batch).logits.isfinite().all()
    ids_BL = batch["input_ids"].copy()
    ids_BL[ids_BL == VIDEO] = IMAGE
    for wrong in (ids_BL, paddle.to_tensor(ids_BL)):
        with pytest.raises(ValueError, match="11 image placeholder tokens .* but 7 image"):
            model(**batch | {"input_ids": wrong})


@pytest.mark.parametrize("name", ["update", "gather", "source"])
def test_indices_of_another_batch_of_equal_shapes_are_refused_in_the_checked_mode(name):
    indices = carried(MIXED)
    key = f"visual_{name}_indices"
    other = indices | {key: indices[key].roll(1)}
    with checked_values():
        build()(visual_args(MIXED) | indices)
        with pytest.raises(ValueError, match=f"{key} are not those of this batch"):
            build()(visual_args(MIXED) | other)


@pytest.mark.parametrize("ids_BL", [MIXED, IMAGES, TEXT], ids=["mixed", "images", "text"])
def test_the_checked_mode_takes_what_fits(ids_BL):
    args = visual_args(ids_BL)
    with checked_values():
        build()(args)
        for rank in range(2):
            placement = MockedSequenceParallel(rank, 2)
            build(placement)(args | carried(ids_BL, placement.ops.row_part))
        if ids_BL is not MIXED:
            build()(masked_args(ids_BL, args))
    # Of the dummy image of a rank without images.
    unused = visual_args(token_rows([("image", 1)], length=8))
    unused |= {name: value[:0] for name, value in carried(IMAGES).items()}
    unused |= {"input_ids": paddle.ones([1, 8], "int64"), "num_unused_visual_rows": 1}
    with checked_values():
        build()(unused)
