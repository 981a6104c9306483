"""STAND-IN. Contract of `src/paddlefleet/gpt_builders.py` as stored in 2026-11 (the test of it,
69676849472, tells the order): the builder makes the specs of the layers, whose numbers count the
head-empty layers, calls `get_gpt_spec` by its name in this module, all by keyword, and builds the
model.
"""

from paddle.distributed.fleet.meta_parallel import LayerSpec, build_spec_layer

from paddlefleet.models.common.empty_layer import EmptyLayer
from paddlefleet.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_spec,
    get_gpt_spec,
)


def layer_specs(config):
    num_empty = config.num_empty_layers_add_in_head
    return {
        "head_empty_layers_spec": [
            LayerSpec(layer=EmptyLayer, extra_kwargs={"config": config}) for _ in range(num_empty)
        ],
        "transformer_layers_spec": [
            get_gpt_layer_local_spec(config=config, layer_number=number + num_empty)
            for number in range(config.num_hidden_layers)
        ],
        "mtp_layers_spec": [
            get_gpt_mtp_spec(config, depth) for depth in range(config.num_nextn_predict_layers)
        ],
        "tail_empty_layers_spec": [],
    }


def gpt_builder(config, **options):
    loss_fn = options.pop("loss_fn", None)
    spec = get_gpt_spec(
        config=config,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_sequence_length,
        position_embedding_type=config.position_embedding_type,
        rotary_percent=config.rotary_percent,
        rotary_base=config.rope_theta,
        swa_rotary_base=config.swa_rope_theta,
        rope_scaling=False,
        parallel_output=False,
        tie_word_embeddings=False,
        **layer_specs(config),
    )
    return build_spec_layer(spec, loss_fn=loss_fn, **options)
