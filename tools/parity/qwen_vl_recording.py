"""Intermediate values of a Qwen3-VL under their golden names."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import paddle

from paddle_vl.batch.positions import PatchRows, frame_runs, vision_layout
from paddle_vl.nn.attention import Segments, vision_tables
from parity.recording import Recording, array


class DecoderRecording(Recording):
    """Records the layers of the decoder and the outputs of its routers."""

    def __init__(self, model):
        decoder = model.language_model
        named = {"embedding": decoder.embedding, "norm_out": decoder.norm}
        for i, layer in enumerate(decoder.layers):
            named |= {f"layer_out.{i}": layer, f"attn_out.{i}": layer.self_attn}
            if layer.has_experts:
                named[f"router.{i}"] = layer.mlp.gate
        for i, layer in enumerate(decoder.deepstack_layers):
            named[f"layer_ds.{i}"] = layer
        super().__init__(named, array)

    def quantities(self) -> dict[str, np.ndarray]:
        """What the decoder computed; a deepstack level, if there is one, replaces `layer_ds`."""
        outputs = {name: calls[0] for name, calls in self.calls.items() if "input" not in name}
        embedded = outputs.pop("embedding")
        cos, sin = map(array, embedded["rotary_pos_emb"])

        def rows(output: Any) -> np.ndarray:
            # A layer with experts may return its routing sums too.
            x_TD = output[0] if isinstance(output, tuple) else output
            return x_TD.reshape(*cos.shape[:2], -1)

        found = {"lm.rope_cos": cos, "lm.rope_sin": sin}
        found["lm.inputs_embeds"] = rows(embedded["hidden_states"])
        for n, level in enumerate(embedded.get("deepstack_visual_emb", [])):
            found[f"lm.deepstack_visual_embeds.{n}"] = level
        if "visual_update_indices" in embedded:
            mask_BL = np.zeros(cos.shape[:2], dtype=bool)
            mask_BL.reshape(-1)[array(embedded["visual_update_indices"])] = True
            found["visual_pos_masks"] = mask_BL
        for name, output in outputs.items():
            if name.startswith("layer_out"):
                found[f"lm.{name.replace('out', 'ds')}"] = rows(output)
        own = {name: output for name, output in outputs.items() if "router" not in name}
        return found | {f"lm.{name}": rows(output) for name, output in own.items()}


def router_quantities(
    calls: Mapping[str, list], tensors: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, np.ndarray]]:
    """Logits, weights and indices of the real tokens in the case's MoE layers, sorted by expert.

    Args:
        calls: of a `Recording` whose routers are named `router.NUMBER`.
    """
    for name, (routing,) in calls.items():
        if not name.startswith("router") or "input" in name:
            continue
        order = routing.indices.argsort(axis=-1)
        values = {
            "logits": routing.logits,
            "weights": np.take_along_axis(routing.weights, order, axis=-1),
            "indices": np.take_along_axis(routing.indices, order, axis=-1),
        }
        for kind, value in values.items():
            golden = f"lm.router_{kind}.{name.partition('.')[2]}"
            if golden in tensors:
                yield golden, value


def tower_quantities(model, pixels: np.ndarray, grid: np.ndarray) -> dict[str, np.ndarray]:
    """Names and values inside the vision tower for one modality."""
    tower, config = model.visual, model.config.vision_config
    layout = vision_layout(grid, table_side=config.table_side, merge=config.spatial_merge_size)
    places = PatchRows(*map(paddle.to_tensor, layout))
    layers = {"patch_embed": tower.patch_embed}
    layers |= {f"block_out.{i}": block for i, block in enumerate(tower.blocks)}
    with paddle.no_grad(), Recording(layers, array) as recorded:
        features = tower(paddle.to_tensor(pixels), places, Segments(frame_runs(grid)))
    found = {name: calls[0] for name, calls in recorded.calls.items() if "input" not in name}
    found["block_in"] = recorded.calls["block_out.0 input"][0][0]
    width = config.hidden_size // config.num_heads
    found["rope_cos"], found["rope_sin"] = map(
        array, vision_tables(places.coordinates, width, config.rope_theta)
    )
    found["merged"] = array(features.merged)
    return found | {f"deepstack.{n}": array(level) for n, level in enumerate(features.levels)}
