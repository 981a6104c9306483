"""STAND-IN. Contract of `src/paddlefleet/models/gpt/gpt_embedding.py` (stored as 70599790775), in
its order:

1. in the accuracy-compatible mode with MTP the last ids become 0, in the given dictionary too;
2. with a `decoder_input` 3 to 6 are left out, images and videos are not looked at;
3. ids are embedded; with experts on several ranks, rows of padding become 0 and `input_ids` is an
   output;
4. `_merge_multimodal` puts images and videos into the whole `[B, S, D]`. Of one kind, the levels
   are handed on as given; of both kinds each level of either is viewed as `[all visual tokens, D]`,
   which fails as soon as both have rows, as does `zip` without levels;
5. with MTP the rows are cut into the main part and one shifted chunk a depth, of merged rows; under
   sequence parallelism each is cut flattened, batch-major;
6. without MTP the sequence is cut for sequence parallelism; with it levels are refused;
7. the rotary embedding, whole; 8. rows need a gradient if gradients are on;
9. entries that are None are left out, and all are made contiguous.

Left out: labels, which need a GPU, erndata, dsv4, magic send, context parallelism, sliding windows.
"""

from dataclasses import dataclass
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.meta_parallel import build_spec_layer
from paddlefleet.tensor_parallel.mappings import scatter_to_sequence_parallel_region


def make_contiguous(value):
    if isinstance(value, list | tuple):
        return type(value)(make_contiguous(one) for one in value)
    return value.contiguous() if isinstance(value, paddle.Tensor) else value


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
        swa_rotary_base=10000,
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
        self.position_embedding_type = position_embedding_type

    @property
    def embedding_weight(self):
        return self.embedding.embedding_weight

    def forward(self, dict_args, decoder_input=None, packed_seq_params=None):
        config, hidden = self.config, decoder_input
        depth = 0 if config.mtp_load_weight_only else config.num_nextn_predict_layers
        input_ids, position_ids = dict_args["input_ids"], dict_args.get("position_ids")
        if config.use_accuracy_compatible and depth and input_ids is not None:
            input_ids = paddle.concat(
                [input_ids[:, :-depth], paddle.zeros_like(input_ids[:, -depth:])], axis=1
            )
            dict_args["input_ids"] = input_ids
        if input_ids is None and hidden is None:
            hidden = dict_args.get("decoder_input")
        outputs: dict[str, Any] = {}
        if hidden is None:
            hidden, outputs = self._embedded(dict_args, input_ids, position_ids, depth)
        if self.position_embedding_type == "mrope":
            table = position_ids[0].unsqueeze(-1).expand([-1, -1, config.head_dim])
            table = table.astype("float32")
            outputs["rotary_pos_emb"] = (
                table.transpose([1, 0, 2]) if self.sequence_parallel else table
            )
        if paddle.is_grad_enabled() and hidden.is_leaf:
            hidden.stop_gradient = False
        outputs |= {
            "hidden_states": hidden,
            "position_ids": position_ids,
            "attention_mask": dict_args.get("attention_mask"),
            "attn_mask_startend_row_indices": dict_args.get("attn_mask_startend_row_indices"),
        }
        return {key: make_contiguous(one) for key, one in outputs.items() if one is not None}

    def _embedded(self, dict_args, input_ids, position_ids, depth):
        config, outputs = self.config, {}
        hidden = self.embedding(
            input_ids=input_ids, position_ids=None if self.multimodal_embedding else position_ids
        )
        if (
            config.expert_model_parallel_size > 1
            and config.tensor_model_parallel_size < 2
            and not config.use_accuracy_compatible
        ):
            real = (input_ids != config.pad_token_id).unsqueeze(-1).astype(hidden.dtype)
            hidden, outputs["input_ids"] = hidden * real, input_ids
        masks = levels = None
        if self.multimodal_embedding:
            hidden, masks, levels = self._merge_multimodal(
                dict_args,
                input_ids,
                hidden,
                dict_args.get("deepstack_image_embeds"),
                dict_args.get("deepstack_video_embeds"),
            )
        if depth:
            if levels is not None:
                raise ValueError("deepstack does not work with multi-token prediction")
            hidden, chunks = self._cut_for_mtp(hidden, depth)
            if config.separate_mtp_input:
                outputs["mtp_decoder_inputs"] = paddle.stack(chunks)
            else:
                hidden = paddle.concat([hidden, *chunks])
            masks = None if masks is None else masks[..., :-depth]
        elif self.multimodal_embedding and self.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(
                hidden.transpose([1, 0, 2]).contiguous(), group=self.embedding.tp_group
            )
        return hidden, outputs | {"deepstack_visual_emb": levels, "visual_pos_masks": masks}

    def _cut_for_mtp(self, hidden, depth):
        batch, length, width = hidden.shape
        kept = length - depth
        parts = [hidden[:, first : first + kept] for first in range(depth + 1)]
        if self.sequence_parallel:
            for number, part in enumerate(parts):
                rows = scatter_to_sequence_parallel_region(
                    part.reshape([batch * kept, width]), group=self.embedding.tp_group
                )
                parts[number] = rows.reshape([batch, -1, width]).transpose([1, 0, 2])
        return parts[0], parts[1:]

    def _merge_multimodal(
        self,
        dict_args,
        input_ids,
        decoder_input,
        deepstack_image_embeds,
        deepstack_video_embeds,
    ):
        found, hidden, levels = {}, decoder_input, None
        for kind, of_kind in (("image", deepstack_image_embeds), ("video", deepstack_video_embeds)):
            embeds = dict_args.get(f"{kind}_embeds")
            if embeds is None:
                continue
            masks = self.get_placeholder_mask(input_ids, hidden, **{f"{kind}_features": embeds})
            wide = masks[0 if kind == "image" else 1]
            keep = 1.0 - wide.astype(hidden.dtype)
            flat = paddle.scatter(
                (hidden * keep).reshape([-1]),
                paddle.nonzero(wide.reshape([-1])).squeeze(-1),
                embeds.astype(hidden.dtype).reshape([-1]),
            )
            hidden, found[kind], levels = flat.reshape(hidden.shape), wide[..., 0], of_kind
        if len(found) < 2:
            return hidden, next(iter(found.values()), None), levels
        mask = found["image"] | found["video"]
        levels = [
            self._joint(mask, found, image, video)
            for image, video in zip(deepstack_image_embeds, deepstack_video_embeds, strict=True)
        ]
        return hidden, mask, levels

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

    def get_placeholder_mask(
        self, input_ids, inputs_embeds, image_features=None, video_features=None
    ):
        masks = []
        for kind, features in (("image", image_features), ("video", video_features)):
            mask = input_ids == getattr(self.config, f"{kind}_token_id")
            tokens = int(mask.sum())
            if features is not None and tokens * inputs_embeds.shape[-1] != features.numel():
                raise ValueError(f"{kind} features and tokens do not match: {tokens}")
            masks.append(mask.unsqueeze(-1).expand_as(inputs_embeds))
        return masks
