"""STAND-IN. Contract of `src/paddlefleet/models/gpt/gpt_model.py`: a `PipelineLayer` of embedding,
head-empty layers, text layers, MTP layers, tail-empty layers and head, each built from its spec (of
0.3 and of the version stored as 61875826167).
"""

from dataclasses import dataclass
from typing import Any

from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer


@dataclass
class GPTSublayersSpec:
    embedding: Any = None
    head_empty_layers: list | None = None
    transformer_layers: list | None = None
    tail_empty_layers: list | None = None
    mtp: list | None = None
    lm_head: Any = None


class GPTModel(PipelineLayer):
    def __init__(self, sublayers_spec, config, tie_word_embeddings=False, **options):
        specs = [
            sublayers_spec.embedding,
            *sublayers_spec.head_empty_layers,
            *sublayers_spec.transformer_layers,
            *(sublayers_spec.mtp or []),
            *sublayers_spec.tail_empty_layers,
            sublayers_spec.lm_head,
        ]
        topology = None
        if config.pipeline_model_parallel_size > 1:
            topology = fleet.get_hybrid_communicate_group().topology()
        super().__init__(layers=[LayerDesc(spec) for spec in specs], topology=topology, **options)
