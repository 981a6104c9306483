"""STAND-IN. Contract of `src/paddlefleet/transformer/transformer_layer.py` of PaddleFleet 0.3:

- the constructor's parameters, `config`, `layer_number`, `full_recompute`;
- `forward(dict_args)` returns the same entries with new `hidden_states`;
- the computation takes its entries as named arguments: the base layer knows none of deepstack's.

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
    ):
        super().__init__()
        self.config, self.layer_number = config, layer_number
        self.full_recompute = config.recompute_granularity == "full"
        width = config.hidden_size
        self.mlp = nn.Linear(width, width, bias_attr=False)
        generator = np.random.default_rng(100 + layer_number)
        weight = generator.standard_normal([width, width]) / width**0.5
        self.mlp.weight.set_value(paddle.to_tensor(weight.astype("float32")))

    def forward(self, dict_args):
        dict_args.pop("position_ids", None)
        if self.full_recompute:
            hidden = recompute(
                self._forward_impl, dict_args["hidden_states"], dict_args.get("attention_mask")
            )
        else:
            hidden = self._forward_impl(**dict_args)
        return {**dict_args, "hidden_states": hidden}

    def _forward_impl(self, hidden_states, attention_mask=None):
        return hidden_states + nn.functional.silu(self.mlp(hidden_states))


class TransformerLayerWithOverlap(TransformerLayer):
    """Published beside the layer; its schedule node calls parts of it instead of `forward`."""
