"""Inputs of GPTEmbedding that several test files share."""

import numpy as np
import paddle

from paddle_vl.batch.visual_index import RowPart, host_visual_indices
from paddle_vl.families.vlm.modeling.embedding_inputs import embedded
from paddle_vl.families.vlm.modeling.layers import GPTEmbedding
from paddle_vl.nn.placement import SingleDevicePlacement
from paddle_vl.testing.qwen3_vl import IMAGE, VIDEO, token_rows
from tests.support.tiny import tiny_config

IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
WIDTH, LEVELS = 16, 2

# Images and videos mixed, several per sample, and a sample without any.
MIXED = token_rows(
    [1, ("image", 3), 2, ("video", 2), ("image", 1)], [3, 4, 5], [("video", 4), 6, ("image", 2)],
    length=16,
)  # fmt: skip
IMAGES = token_rows([1, ("image", 7), 2], [3, 4], [5, ("image", 2), 6, ("image", 3)], length=16)
TEXT = token_rows([1, 2, 3], [4, 5], length=8)


class DictEmbedding(paddle.nn.Layer):
    """An embedding called with a dictionary."""

    def __init__(self, placement):
        super().__init__()
        self.embedding = GPTEmbedding(tiny_config(), placement)
        self.embed_tokens = self.embedding.embed_tokens

    def forward(self, dict_args):
        return embedded(self.embedding, dict_args)


def build(placement=None) -> DictEmbedding:
    paddle.seed(0)
    return DictEmbedding(placement or SingleDevicePlacement())


def visual_args(ids_BL: np.ndarray, seed: int = 0) -> dict:
    """Embeddings and levels for every placeholder of the batch, and positions."""
    rng = np.random.default_rng(seed)
    args = {
        "input_ids": paddle.to_tensor(ids_BL),
        "position_ids": paddle.to_tensor(np.tile(np.arange(ids_BL.shape[1]), (3, len(ids_BL), 1))),
    }
    for kind, token in (("image", IMAGE), ("video", VIDEO)):
        count = int((ids_BL == token).sum())
        if count:
            draws = rng.normal(size=(1 + LEVELS, count, WIDTH)).astype(np.float32)
            merged, *levels = (paddle.to_tensor(draw, stop_gradient=False) for draw in draws)
            args |= {f"{kind}_embeds": merged, f"deepstack_{kind}_embeds": levels}
    return args


def carried(ids_BL: np.ndarray, part: RowPart | None = None) -> dict:
    arrays = host_visual_indices(
        ids_BL,
        num_image_rows=int((ids_BL == IMAGE).sum()),
        num_video_rows=int((ids_BL == VIDEO).sum()),
        part=part,
        **IDS,
    )
    return {name: paddle.to_tensor(array) for name, array in arrays.items()}


def masked_args(ids_BL: np.ndarray, args: dict) -> dict:
    """The inputs without `input_ids`: a mask and hidden states with the placeholders' rows."""
    embedding = build()
    rest = {name: value for name, value in args.items() if name != "input_ids"}
    return rest | {
        "decoder_input": embedding.embed_tokens(args["input_ids"]),
        "visual_pos_masks": paddle.to_tensor(np.isin(ids_BL, (IMAGE, VIDEO))),
    }
