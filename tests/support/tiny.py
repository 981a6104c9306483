"""Tiny models, batches and mocks that several tests share."""

from pathlib import Path

import numpy as np
import paddle

from paddle_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from paddle_vl.batch.visual_index import RowPart
from paddle_vl.nn.parameter_table import ParameterTable
from paddle_vl.nn.placement import CheckpointRanks, LayerFactory, Placement, RegionOps, StageLayers

GOLDEN = Path(__file__).parents[1] / "golden"
# For golden cases: kernels of `paddle_vl.nn`, and whether Paddle's own may return views.
IMPLEMENTATIONS = [("cpu", True), ("cpu", False), ("plain", True), ("gpu", True)]
# Text settings of a tiny model with experts; its second layer is dense.
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [1],
}  # fmt: skip
IMAGE, VIDEO, VISION_START, VISION_END = 60, 61, 62, 63


def tiny_config(**text_overrides) -> Qwen3VLConfig:
    """Three decoder layers of width 16, two deepstack levels, vocabulary of 64; with experts if
    `text_overrides` has them."""
    text = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
        "out_hidden_size": text_overrides.get("hidden_size", 16), "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    return Qwen3VLConfig.from_dict(
        {
            "model_type": "qwen3_vl_moe" if "num_experts" in text_overrides else "qwen3_vl",
            "text_config": text | text_overrides, "vision_config": vision,
            "image_token_id": IMAGE, "video_token_id": VIDEO,
            "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END,
        }
    )  # fmt: skip


def tiny_model(seed: int = 0, **text_overrides) -> Qwen3VLForConditionalGeneration:
    """A model in which no parameter has a neutral value."""
    paddle.seed(seed)
    model = Qwen3VLForConditionalGeneration.from_config(tiny_config(**text_overrides))
    rng = np.random.default_rng(seed)
    for parameter in model.parameters():
        noise = rng.normal(scale=0.2, size=parameter.shape).astype(np.float32)
        parameter.set_value(parameter.numpy() + noise)
    return model


def token_rows(*samples: list, length: int | None = None, pad: int = 0) -> np.ndarray:
    """Rows of ids from lists; `("image", n)` or `("video", n)` stands for n placeholders."""
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


def patches(grids: list[list[int]], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random pixel rows for the grids in the tiny tower's format, and the grids as an array."""
    grid_thw = np.array(grids, dtype=np.int64)
    count = int(grid_thw.prod(axis=1).sum())
    patch_dim = tiny_config().vision_config.patch_dim
    pixels = np.random.default_rng(seed).normal(size=(count, patch_dim)).astype(np.float32)
    return pixels, grid_thw


class MockedRows(RegionOps):
    """Token rows of one of several ranks, on one card and without communication."""

    def __init__(self, rank: int, size: int):
        super().__init__()
        self.rank, self.size = rank, size

    @property
    def row_part(self) -> RowPart:
        return RowPart(self.rank, self.size)

    def enter_rows(self, x_TD: paddle.Tensor) -> paddle.Tensor:
        return self.row_part.of_rows(x_TD)


class MockedSequenceParallel(Placement):
    """One rank of an mp group, on one card and with full layers."""

    def __init__(self, rank: int, size: int):
        ops, stage_layers = MockedRows(rank, size), StageLayers()
        layers = LayerFactory(ParameterTable(), ops, stage_layers)
        super().__init__(layers, ops, stage_layers, CheckpointRanks())


class forbid_host_reads:  # noqa: N801 - reads as a statement: with forbid_host_reads():
    """Make every way of reading a tensor on the host raise while the block runs."""

    NAMES = ("numpy", "item", "tolist", "__bool__", "__int__", "__float__", "__index__")

    def __enter__(self):
        self.kept = {name: getattr(paddle.Tensor, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(paddle.Tensor, name, self._refusal(name))

    def __exit__(self, *exception):
        for name, method in self.kept.items():
            setattr(paddle.Tensor, name, method)

    @staticmethod
    def _refusal(name: str):
        def refuse(self, *args, **kwargs):
            raise AssertionError(f"host read: Tensor.{name}()")

        return refuse
