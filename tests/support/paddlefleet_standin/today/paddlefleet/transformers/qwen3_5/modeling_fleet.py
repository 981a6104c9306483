"""STAND-IN. Contract of `src/paddlefleet/transformers/qwen3_5/modeling_fleet.py` at commit
e7b7f55b: it calls `get_gpt_spec` by a name of its own, not `gpt_builder`; text layers are the base
class and there are no deepstack levels.
"""

from paddle.distributed.fleet.meta_parallel import build_spec_layer
from paddlefleet.gpt_builders import layer_specs
from paddlefleet.models.gpt.gpt_layer_specs import get_gpt_spec


def get_qwen3_5_language_spec(config):
    return get_gpt_spec(
        config=config,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_sequence_length,
        position_embedding_type=config.position_embedding_type,
        **layer_specs(config),
    )


def build_qwen3_5_model(config, **options):
    return build_spec_layer(get_qwen3_5_language_spec(config), **options)
