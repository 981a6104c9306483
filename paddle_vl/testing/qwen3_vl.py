"""A tiny Qwen3-VL and batches for it."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import paddle

from paddle_vl.families.qwen3_vl.config import Qwen3VLConfig
from paddle_vl.families.qwen3_vl.model import Qwen3VLForConditionalGeneration
from paddle_vl.families.vlm.folders.pretrained import PretrainedVLModel
from paddle_vl.nn.placement import Placement
from paddle_vl.testing.tensors import copy_parameters

Model = TypeVar("Model", bound=PretrainedVLModel)
IMAGE, VIDEO, VISION_START, VISION_END = 60, 61, 62, 63
IGNORED = -100
# Text settings of a tiny model with experts; its second layer is dense.
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [1],
}  # fmt: skip


class Image(NamedTuple):
    """An image of `height` x `width` patches, both even; a quarter as many tokens."""

    height: int = 4
    width: int = 4


class Video(NamedTuple):
    """A video of `frames` temporal patches of `height` x `width` patches, both even."""

    frames: int = 2
    height: int = 4
    width: int = 4


Item = int | Image | Video

# A sample with both modalities, one of text, one of an image that starts the row, and an empty one.
MIXED: tuple[Sequence[Item], ...] = (
    (1, Video(2, 2, 4), 2, Image(4, 4), 3, 5, 7),
    (7, 8, 9, 3, 4),
    (Image(2, 4), 6, Image(2, 2), 5),
    (),
)


def tiny_qwen3_vl_config(**text: Any) -> Qwen3VLConfig:
    """Three decoder layers of width 16, two deepstack levels, a vocabulary of 64.

    8 query heads share 2 key heads, so that mp_degree 1, 2, 4 and 8 run.

    Args:
        text: settings of the text model to change; with those of `EXPERTS` it has experts, and
            `tie_word_embeddings` belongs here too.
    """
    defaults = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    return Qwen3VLConfig.from_dict(tiny_values("qwen3_vl", defaults | text, [0, 1]))


def tiny_values(
    model_type: str, text: dict[str, Any], deepstack_visual_indexes: list[int]
) -> dict[str, Any]:
    """Values of config.json with a tiny tower and the ids of this module."""
    tied = text.pop("tie_word_embeddings", False)
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": text["hidden_size"], "num_position_embeddings": 16,
        "deepstack_visual_indexes": deepstack_visual_indexes,
    }  # fmt: skip
    return {
        "model_type": f"{model_type}_moe" if "num_experts" in text else model_type,
        "text_config": text, "vision_config": vision, "tie_word_embeddings": tied,
        "image_token_id": IMAGE, "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END,
    }  # fmt: skip


def tiny_qwen3_vl(
    placement: Placement | None = None, seed: int = 0, **text: Any
) -> Qwen3VLForConditionalGeneration:
    """A tiny model in which no parameter has a neutral value, such as a norm's 1 or a bias's 0.

    Equal seeds give equal full parameters under every placement.

    Args:
        text: see `tiny_qwen3_vl_config`.
    """
    config = tiny_qwen3_vl_config(**text)
    return unlike_neutral(Qwen3VLForConditionalGeneration, config, placement, seed)


def unlike_neutral(
    model_class: type[Model], config: Any, placement: Placement | None, seed: int
) -> Model:
    """A fresh model with noise on every parameter."""
    paddle.seed(seed)
    model = model_class.from_config(config)
    rng = np.random.default_rng(seed)
    for parameter in model.parameters():
        noise = rng.normal(scale=0.2, size=parameter.shape).astype(np.float32)
        parameter.set_value(parameter.numpy() + noise)
    if placement is None:
        return model
    placed = model_class.from_config(config, placement)
    copy_parameters(model, placed)
    return placed


def token_rows(*samples: Sequence[Any], length: int | None = None, pad: int = 0) -> np.ndarray:
    """Rows of ids `[B, L]` from lists; `("image", n)` or `("video", n)` is n placeholders."""
    rows = []
    for sample in samples:
        row = []
        for item in sample:
            if isinstance(item, tuple):
                row += [IMAGE if item[0] == "image" else VIDEO] * item[1]
            else:
                row.append(item)
        rows.append(row)
    length = length or max(map(len, rows))
    return np.array([row + [pad] * (length - len(row)) for row in rows], dtype=np.int64)


def patches(grids: Sequence[Sequence[int]], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random pixel rows `[P, patch_dim]` of these `(t, h, w)` grids, and the grids as an array."""
    grid_thw = np.array(grids, dtype=np.int64).reshape([-1, 3])
    count = int(grid_thw.prod(axis=1).sum())
    patch_dim = tiny_qwen3_vl_config().vision_config.patch_dim
    pixels = np.random.default_rng(seed).normal(size=(count, patch_dim)).astype(np.float32)
    return pixels, grid_thw


def tiny_qwen3_vl_batch(
    *samples: Sequence[Item], pad_to_multiple_of: int = 8, seed: int = 0
) -> dict[str, np.ndarray]:
    """A batch for the tiny model, as keyword arguments of its call.

    Args:
        samples: token ids below 60, `Image` and `Video` in reading order; an empty one is a row of
            padding. Default: `MIXED`, which has images, videos, text and an empty sample.
        pad_to_multiple_of: of the padded length; the mp degrees must divide the token rows.

    Returns:
        `input_ids`, `attention_mask` and `labels` `[B, L]` (placeholders, each row's first token
        and padding are ignored), and pixels and grids of the modalities that occur.

    Raises:
        ValueError: a token id that is not text, or a side that is not even.
    """
    samples = samples or MIXED
    rows, grids = [], {"image": [], "video": []}
    for sample in samples:
        row: list[int] = []
        for item in sample:
            _check(item)
            if isinstance(item, Image):
                grids["image"].append((1, *item))
                row += [IMAGE] * (item.height * item.width // 4)
            elif isinstance(item, Video):
                grids["video"].append(tuple(item))
                frame = [VIDEO] * (item.height * item.width // 4)
                # As a timestamp does, a text token begins every frame.
                row += [token for t in range(item.frames) for token in [1 + t, *frame]]
            else:
                row.append(item)
        rows.append(row)
    longest = max([1, *map(len, rows)])
    length = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
    mask = np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows], dtype=np.int64)
    ids = token_rows(*rows, length=length)
    labels = np.where((mask == 1) & ~np.isin(ids, (IMAGE, VIDEO)), ids, IGNORED)
    labels[:, 0] = IGNORED
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    for number, (kind, pixels) in enumerate(
        (("image", "pixel_values"), ("video", "pixel_values_videos"))
    ):
        if grids[kind]:
            batch[pixels], batch[f"{kind}_grid_thw"] = patches(grids[kind], 2 * seed + number)
    return batch


def _check(item: Item) -> None:
    if isinstance(item, Image | Video):
        if min(item) < 1 or item.height % 2 or item.width % 2:
            raise ValueError(
                f"{item}: sizes are in patches and positive, height and width even, since 2 x 2 "
                "patches make one token"
            )
    elif not 0 <= item < IMAGE:
        raise ValueError(
            f"token id {item}: ids of text are in [0, {IMAGE}); give pictures as Image and Video"
        )
