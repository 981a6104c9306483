"""STAND-IN. Contract of `src/paddlefleet/transformer/multi_token_prediction.py` (stored as
59598664124): a layer joins the hidden states of the depth before with the embedded tokens of its
depth, which are a chunk of `hidden_states` or of `mtp_decoder_inputs`, and puts its own in place of
the chunk. Here they are added.
"""

import paddle
from paddle import nn
from paddle.distributed.fleet.meta_parallel import build_spec_layer


class MultiTokenPredictionLayer(nn.Layer):
    def __init__(self, sublayers_spec, config, depth):
        super().__init__()
        self.config, self.depth = config, depth
        self.layer = build_spec_layer(sublayers_spec)

    def forward(self, dict_args):
        if self.config.separate_mtp_input and self.depth == 0:
            # The first depth joins the parts; the layers before it have seen the main part alone.
            chunks = list(dict_args.pop("mtp_decoder_inputs"))
            dict_args["hidden_states"] = paddle.concat([dict_args["hidden_states"], *chunks])
        parts = paddle.split(dict_args["hidden_states"], 1 + self.config.num_nextn_predict_layers)
        joined = parts[self.depth] + parts[self.depth + 1]
        parts[self.depth + 1] = self.layer({"hidden_states": joined})["hidden_states"]
        return {**dict_args, "hidden_states": paddle.concat(parts)}
