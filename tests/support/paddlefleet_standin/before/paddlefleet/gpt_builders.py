"""STAND-IN. Contract of `src/paddlefleet/gpt_builders.py` of PaddleFleet 0.3: the builder makes the
specs of the layers, whose numbers count the head-empty layers, calls `get_gpt_spec` by its name in
this module, and builds the model.
"""

from paddle.distributed.fleet.meta_parallel import LayerSpec, build_spec_layer

from paddlefleet.models.common.empty_layer import EmptyLayer
from paddlefleet.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_spec


def gpt_builder(config, **options):
    num_empty = config.num_empty_layers_add_in_head
    spec = get_gpt_spec(
        config=config,
        head_empty_layers_spec=[
            LayerSpec(layer=EmptyLayer, extra_kwargs={"config": config}) for _ in range(num_empty)
        ],
        transformer_layers_spec=[
            get_gpt_layer_local_spec(config=config, layer_number=number + num_empty)
            for number in range(config.num_hidden_layers)
        ],
        tail_empty_layers_spec=[],
        mtp_layers_spec=None,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_sequence_length,
        position_embedding_type=config.position_embedding_type,
    )
    return build_spec_layer(spec, **options)
