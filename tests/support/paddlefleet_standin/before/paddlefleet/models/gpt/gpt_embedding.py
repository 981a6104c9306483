"""STAND-IN. Contract of `src/paddlefleet/models/gpt/gpt_embedding.py` of PaddleFleet 0.3:

- the constructor's and `forward`'s parameters; `embedding` is built from the spec;
- with `multimodal_embedding`, placeholders are searched, counted on the host (both kinds for each
  modality given), and their rows replaced; afterwards the sequence is cut for sequence parallelism
  and laid out as `[S / mp, B, D]`;
- levels are whole tensors `[M, D]`, given on as `deepstack_visual_emb` with `visual_pos_masks`;
- with images and videos each level of either kind is viewed as `[all visual tokens, D]`, which
  fails as soon as both kinds have rows;
- with a `decoder_input` images and videos are not looked at; entries that are None are left out.
"""

from dataclasses import dataclass
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.meta_parallel import build_spec_layer
from paddlefleet.tensor_parallel.mappings import scatter_to_sequence_parallel_region


@dataclass
class GPTEmbeddingSpec:
    language_embedding: Any
    rope_embedding: Any = None


class GPTEmbedding(nn.Layer):
    def __init__(
        self,
        sublayers_spec,
        config,
        vocab_size,
        max_sequence_length,
        position_embedding_type="learned_absolute",
        rotary_percent=1.0,
        rotary_base=10000,
        rope_scaling=False,
        mrope_section=None,
    ):
        super().__init__()
        self.config = config
        self.embedding = build_spec_layer(
            sublayers_spec.language_embedding,
            config=config,
            vocab_size=vocab_size,
            max_sequence_length=max_sequence_length,
            position_embedding_type=position_embedding_type,
        )
        self.sequence_parallel = config.sequence_parallel
        self.multimodal_embedding = config.multimodal_embedding

    @property
    def embedding_weight(self):
        return self.embedding.embedding_weight

    def forward(self, dict_args, decoder_input=None, packed_seq_params=None):
        input_ids, position_ids = dict_args["input_ids"], dict_args.get("position_ids")
        masks, levels = None, None
        if input_ids is None and decoder_input is None:
            decoder_input = dict_args.get("decoder_input")
        if decoder_input is None:
            hidden = self.embedding(input_ids=input_ids, position_ids=None)
            if self.multimodal_embedding:
                hidden, masks, levels = self._place_visual(hidden, input_ids, dict_args)
                if self.sequence_parallel:
                    hidden = scatter_to_sequence_parallel_region(
                        hidden.transpose([1, 0, 2]).contiguous(), group=self.embedding.tp_group
                    )
        else:
            hidden = decoder_input
        outputs = {
            "hidden_states": hidden,
            "attention_mask": dict_args.get("attention_mask"),
            "position_ids": position_ids,
            "deepstack_visual_emb": levels,
            "visual_pos_masks": masks,
        }
        return {name: entry for name, entry in outputs.items() if entry is not None}

    def _place_visual(self, hidden, input_ids, dict_args):
        found, levels = {}, None
        for kind in ("image", "video"):
            embeds = dict_args.get(f"{kind}_embeds")
            if embeds is None:
                continue
            found[kind] = self.get_placeholder_mask(input_ids, hidden, kind, embeds)
            wide = found[kind].unsqueeze(-1).expand_as(hidden)
            keep = 1.0 - wide.astype(hidden.dtype)
            flat = paddle.scatter(
                (hidden * keep).reshape([-1]),
                paddle.nonzero(wide.reshape([-1])).squeeze(-1),
                embeds.astype(hidden.dtype).reshape([-1]),
            )
            hidden = flat.reshape(hidden.shape)
            levels = dict_args.get(f"deepstack_{kind}_embeds")
        if len(found) < 2:
            return hidden, next(iter(found.values()), None), levels
        mask = found["image"] | found["video"]
        return (
            hidden,
            mask,
            [
                self._joint(mask, found, image, video)
                for image, video in zip(
                    dict_args["deepstack_image_embeds"],
                    dict_args["deepstack_video_embeds"],
                    strict=True,
                )
            ],
        )

    def _joint(self, mask, found, image, video):
        visual_tokens = int(mask.sum())
        chosen = {
            kind: paddle.masked_select(
                found[kind].reshape([-1]).astype(image.dtype), mask.reshape([-1])
            ).unsqueeze(-1)
            for kind in found
        }
        shape = [visual_tokens, image.shape[-1]]
        return image.reshape(shape) * chosen["image"] + video.reshape(shape) * chosen["video"]

    def get_placeholder_mask(self, input_ids, hidden, kind, features):
        masks = {
            "image": input_ids == self.config.image_token_id,
            "video": input_ids == self.config.video_token_id,
        }
        tokens = {name: int(mask.sum()) for name, mask in masks.items()}
        if tokens[kind] * hidden.shape[-1] != features.numel():
            raise ValueError(f"{kind} features and tokens do not match: {tokens[kind]}")
        return masks[kind]
