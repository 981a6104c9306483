"""STAND-IN. Contract of `src/paddlefleet/transformer/transformer_layer.py` (stored as 70141097545):

- the constructor's parameters, `config`, `layer_number`, `full_recompute`;
- `forward(dict_args)` changes entries in the dictionary that it gets, and returns the same entries
  with new `hidden_states`; of a layer that is not one of MTP's it computes the main part and leaves
  the chunks behind it as they are, unless these are an entry of their own;
- the computation takes its entries as named arguments and ignores those that it does not know.

A row-wise layer with one weight, drawn from the layer's number.
"""

import numpy as np
import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute


class TransformerLayer(nn.Layer):
    def __init__(
        self,
        config,
        sublayers_spec=None,
        layer_number=1,
        hidden_dropout_prob=None,
        pg_collection=None,
        is_mtp_layer=False,
    ):
        super().__init__()
        self.config, self.layer_number, self.is_mtp_layer = config, layer_number, is_mtp_layer
        self.full_recompute = config.recompute_granularity == "full"
        width = config.hidden_size
        self.mlp = nn.Linear(width, width, bias_attr=False)
        generator = np.random.default_rng(100 + layer_number)
        weight = generator.standard_normal([width, width]) / width**0.5
        self.mlp.weight.set_value(paddle.to_tensor(weight.astype("float32")))

    def forward(self, dict_args):
        config, chunks = self.config, []
        dict_args.pop("position_ids", None)
        hidden = dict_args["hidden_states"]
        depth = 0 if config.mtp_load_weight_only else config.num_nextn_predict_layers
        if depth and not (config.separate_mtp_input or self.is_mtp_layer):
            hidden, *chunks = paddle.split(hidden, depth + 1)
        inputs = {**dict_args, "hidden_states": hidden}
        if self.full_recompute:
            hidden = recompute(self._forward_impl, hidden, inputs.get("attention_mask"))
        else:
            hidden = self._forward_impl(**inputs)
        hidden = paddle.concat([hidden, *chunks]) if chunks else hidden
        return {**dict_args, "hidden_states": hidden}

    def _forward_impl(self, hidden_states, attention_mask=None, rotary_pos_emb=None, **kwargs):
        return hidden_states + nn.functional.silu(self.mlp(hidden_states))
