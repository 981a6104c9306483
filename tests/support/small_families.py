"""Small models of all families, built without values, and their batches.

They are large enough that parameters outweigh buffers and the zeros that pad shards.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl import (
    PI07Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)
from paddle_vl.checkpoint.reading import stored_values
from paddle_vl.checkpoint.safetensors_io import read_header
from paddle_vl.config.schema import LoRAConfig
from paddle_vl.families.pi07.checkpoint_map import engine_keys
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.families.vlm.modeling.delta_config import FULL, LINEAR
from paddle_vl.nn.linear import default_dtype
from paddle_vl.nn.placement import Placement
from paddle_vl.testing import tiny_qwen3_5_config
from paddle_vl.testing.qwen3_vl import IMAGE, patches, token_rows
from tests.support.pi07_golden import CASES, case, config_values
from tests.support.tiny import tiny_config

QWEN = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 8}
WEIGHTS = CASES / "weights_A.safetensors"
_CAMERAS = ("video", "vid_mask", "subgoal_image", "subgoal_img_mask")


def qwen_fresh(
    dtype: str = "float32", placement: Placement | None = None
) -> Qwen3VLForConditionalGeneration:
    paddle.seed(3)
    with default_dtype(dtype):
        return Qwen3VLForConditionalGeneration.from_config(
            tiny_config(**QWEN), placement, materialize=False
        )


def qwen3_5_fresh(dtype: str = "float32") -> Qwen3_5ForConditionalGeneration:
    """In bfloat16 its rates of decay and gated norms are float32."""
    paddle.seed(3)
    sizes = QWEN | {"num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, FULL, LINEAR]}
    with default_dtype(dtype):
        return Qwen3_5ForConditionalGeneration.from_config(
            tiny_qwen3_5_config(**sizes), materialize=False
        )


def write_qwen(folder: Path) -> None:
    """Write a fresh model, and one with adapters and fully trained modules."""
    model = qwen_fresh()
    model.materialize_all()
    model.save_pretrained(folder / "qwen")
    adapted = Qwen3VLForConditionalGeneration.from_pretrained(folder / "qwen")
    adapted.add_lora(_lora())
    adapted.save_adapter(folder / "adapter")


def _lora() -> LoRAConfig:
    return LoRAConfig(r=4, target_modules="all-linear", modules_to_save=["*visual.merger"])


def qwen_files(
    folder: Path, dtype: str = "float32", placement: Placement | None = None
) -> Qwen3VLForConditionalGeneration:
    return Qwen3VLForConditionalGeneration.from_pretrained(
        folder / "qwen", dtype, placement, materialize=False
    )


def qwen_adapters(folder: Path, dtype: str = "float32") -> Qwen3VLForConditionalGeneration:
    paddle.seed(3)
    model = qwen_files(folder, dtype)
    model.add_lora(_lora())
    return model


def qwen_resumed_adapters(folder: Path, dtype: str = "float32") -> Qwen3VLForConditionalGeneration:
    model = qwen_files(folder, dtype)
    model.load_adapter(folder / "adapter")
    return model


def pi07(
    dtype: str = "float32",
    is_fresh: bool = True,
    frozen: bool = False,
    placement: Placement | None = None,
) -> nn.Layer:
    description, _ = case("01_all_fields")
    values = config_values(description)
    values["vlm_config"]["freeze_vision_encoder"] = frozen
    labels = description["config"]["indicator_token_ids"]
    paddle.seed(3)
    with default_dtype(dtype), paddle.LazyGuard():
        model = PI07LowLevelFlowMatching(PI07Config.from_dict(values), labels, placement)
    stored = engine_keys(read_header(WEIGHTS))
    model.materialize_later(
        model.fresh_values if is_fresh else lambda: stored_values(model.stored_parameters(), stored)
    )
    return model


def builders(folder: Path, dtype: str) -> dict[str, Callable[[], nn.Layer]]:
    """Functions that build a model without parameter values, by name."""
    return {
        "qwen fresh": partial(qwen_fresh, dtype),
        "qwen files": partial(qwen_files, folder, dtype),
        "qwen adapters": partial(qwen_adapters, folder, dtype),
        "qwen resumed adapters": partial(qwen_resumed_adapters, folder, dtype),
        "pi07 fresh": partial(pi07, dtype),
        "pi07 files": partial(pi07, dtype, False),
        "pi07 frozen tower": partial(pi07, dtype, False, True),
    }


def units_of(model: nn.Layer) -> list[nn.Layer]:
    return [*model.vision_blocks, *model.decoder_layers]


def loss_of(model: nn.Layer, terms: Sequence[str] = ("MSE", "CE")) -> Tensor:
    """The loss of the family's batch; for pi07 the sum of the given terms."""
    if isinstance(model, PI07LowLevelFlowMatching):
        losses = model(_pi07_batch())
        return sum(losses[term] for term in terms)
    return model(**_qwen_batch()).loss


def _qwen_batch() -> dict[str, Any]:
    pixels, grid = patches([[1, 4, 4]])
    ids = token_rows([1, 9, ("image", 4), 2, 5, 7], [3, 4, 5])
    labels = np.where(ids == IMAGE, -100, ids)
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels, "image_grid_thw": grid}


def _pi07_batch() -> dict[str, Any]:
    _, tensors = case("01_all_fields")
    batch = {name[3:]: value for name, value in tensors.items() if name.startswith("in.")}
    for one in _CAMERAS:
        batch[f"{one}s"] = [batch.pop(f"{one}{i}") for i in range(2)]
    return batch
