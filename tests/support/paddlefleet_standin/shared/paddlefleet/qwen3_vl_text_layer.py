"""STAND-IN for `Qwen3VLTextTransformerLayer`, the literal behaviour to compare with.

Contract of the class in `paddlefleet/transformers/qwen3_vl/modeling_fleet.py` at commit 00662fa0,
whose code is that of `paddleformers/transformers/qwen3_vl/modeling_fleet.py` in PaddleFormers
1.2.0: the layer takes deepstack's entries among its other ones and gives them on, knows no MTP, and
after its own computation, outside of recomputation, adds the level of its `layer_number` at the
mask's True places. Under sequence parallelism the levels are whole: for each sample, the numbers of
visual tokens in all of it, before this rank's slice and in the slice are read on the host.
"""

import paddle
from paddle.distributed.fleet.utils import recompute
from paddlefleet.parallel_state import get_tensor_model_parallel_group
from paddlefleet.transformer.transformer_layer import TransformerLayer


class Qwen3VLTextTransformerLayer(TransformerLayer):
    def forward(self, dict_args):
        levels, mask = dict_args.get("deepstack_visual_emb"), dict_args.get("visual_pos_masks")
        dict_args.pop("position_ids", None)
        if self.full_recompute:
            hidden = recompute(
                self._forward_impl, dict_args["hidden_states"], dict_args.get("attention_mask")
            )
        else:
            hidden = self._forward_impl(**dict_args)
        if levels and self.layer_number in range(len(levels)):
            hidden = self._deepstack_process(hidden, mask, visual_embeds=levels[self.layer_number])
        return {**dict_args, "hidden_states": hidden}

    def _forward_impl(self, hidden_states, attention_mask=None, **kwargs):
        return super()._forward_impl(hidden_states, attention_mask)

    def _deepstack_process(self, hidden_states, visual_pos_masks, visual_embeds):
        by_sequence = self.config.sequence_parallel and hidden_states.ndim == 3
        if by_sequence:
            hidden_states = hidden_states.transpose([1, 0, 2])
        shape = hidden_states.shape
        rows = hidden_states.flatten(0, 1)
        mask = visual_pos_masks
        if mask.shape[1] > rows.shape[0] // mask.shape[0]:
            mask, visual_embeds = self._of_slice(mask, visual_embeds)
        rows = rows.clone()
        update = paddle.nonzero(mask.flatten())
        if visual_embeds.shape[0] > 0:
            rows = paddle.scatter_nd_add(rows, update, visual_embeds.astype(rows.dtype))
        rows = rows.reshape(shape)
        return rows.transpose([1, 0, 2]) if by_sequence else rows

    def _of_slice(self, mask, level):
        group = get_tensor_model_parallel_group()
        width = mask.shape[1] // group.nranks
        begin = group.rank * width
        end = begin + width
        counts = mask.astype("int32")
        total, before, inside = (
            part.sum(1) for part in (counts, counts[:, :begin], counts[:, begin:end])
        )
        rows, offset = [], 0
        for sample in range(mask.shape[0]):
            first, number = int(before[sample].item()), int(inside[sample].item())
            if number:
                rows.append(paddle.arange(offset + first, offset + first + number))
            offset += int(total[sample].item())
        return mask[:, begin:end], level[paddle.concat(rows)] if rows else level[:0]
