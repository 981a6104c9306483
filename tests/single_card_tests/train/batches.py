"""Hand-made batches for the tiny model, as a collator would make them."""

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase

from paddle_vl.batch.positions import mrope_position_ids
from paddle_vl.batch.schema import VLBatch
from paddle_vl.batch.visual_index import host_visual_indices
from paddle_vl.config.schema import TrainConfig
from paddle_vl.families.vlm.inputs.collate import prepared
from paddle_vl.families.vlm.settings import PARTS
from paddle_vl.families.vlm.training.objective import VLBatchAdapter, VLLoss
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank
from paddle_vl.testing.qwen3_vl import IMAGE, VIDEO, VISION_END, VISION_START, patches, token_rows
from paddle_vl.train.freeze import (
    decayed_names,
    freeze_parameters,
    frozen_steps,
    rate_factors,
    trained_names,
)
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.step import ModelRunner, StepOutcome, StepTotals


def image_batch(texts: list[list[int]], prompt_lengths: list[int], seed: int = 0) -> VLBatch:
    """`image_fields` as a worker completes them."""
    return prepared(image_fields(texts, prompt_lengths, seed))


def image_fields(texts: list[list[int]], prompt_lengths: list[int], seed: int = 0) -> dict:
    """One image of 4 tokens before every text; labels start after `prompt_lengths` text tokens."""
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    rows = [[VISION_START, ("image", 4), VISION_END, *text] for text in texts]
    input_ids = token_rows(*rows)
    mask = np.zeros_like(input_ids)
    labels = np.full_like(input_ids, -100)
    for i, (text, prompt) in enumerate(zip(texts, prompt_lengths, strict=True)):
        length = 6 + len(text)
        mask[i, :length] = 1
        labels[i, 6 + prompt : length] = input_ids[i, 6 + prompt : length]
    pixels, grids = patches([[1, 4, 4]] * len(texts), seed)
    position_ids, _ = mrope_position_ids(input_ids, mask, grids, **ids)
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "labels": labels,
        "position_ids": position_ids,
        "pixel_values": pixels,
        "image_grid_thw": grids,
        "num_target_tokens": int((labels[:, 1:] != -100).sum()),
        "has_left_padding": False,
        "real_row_indices": np.flatnonzero(mask),
        **host_visual_indices(input_ids, num_image_rows=4 * len(texts), **ids),
    }


def split_batch(texts: list[list[int]], prompt_lengths: list[int]) -> list[VLBatch]:
    """The samples of `image_batch` as micro-batches of one sample with the same pixels."""
    whole = image_batch(texts, prompt_lengths)
    parts = []
    for i in range(len(texts)):
        part = image_batch(texts[i : i + 1], prompt_lengths[i : i + 1])
        pixels = whole.pixel_values[16 * i : 16 * (i + 1)]
        parts.append(part | {"pixel_values": pixels})
    return parts


def count_calls(layer) -> list:
    """A list that grows by one entry per call of a layer."""
    calls = []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def vl_runner(model, ranks: SingleRank = ONE_RANK) -> ModelRunner:
    return ModelRunner(model, VLLoss(), VLBatchAdapter(), ranks)


def outcome(
    loss: float,
    grad_norm: float,
    num_targets: int,
    num_tokens: int,
    is_good: bool = True,
    num_packed_places: int = 0,
) -> StepOutcome:
    """The outcome of a language model's step on two samples."""
    return StepOutcome(
        paddle.to_tensor([loss]),
        paddle.to_tensor(grad_norm),
        paddle.to_tensor(is_good),
        StepTotals((num_targets,), 2, num_tokens, num_packed_places, ()),
    )


def optimizer_of(model, freeze=(), flat: bool = False, **settings) -> Optimizer:
    """An optimizer of a model without the patterns of `freeze`, in buckets if `flat`."""
    train, named = TrainConfig(output_dir="o", **settings), list(model.hf_named_parameters())
    trained = trained_names(names := dict(named), freeze, parts=PARTS)
    optimizer = Optimizer(
        freeze_parameters(named, trained),
        train,
        decayed_names(names, train.weight_decay_exclude),
        rate_factors=rate_factors(train, trained, PARTS),
        frozen_steps=frozen_steps(train, trained, PARTS),
    )
    if flat:
        optimizer.use_buckets()
    return optimizer


def assert_same_bits(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def parameters_of(rng, shapes, dtype: str) -> list[paddle.Tensor]:
    """Parameters of normal values."""
    values = (paddle.to_tensor(rng.normal(size=shape), dtype=dtype) for shape in shapes)
    return [EagerParamBase.from_tensor(value, trainable=True) for value in values]
