"""STAND-IN. Contract of `src/paddlefleet/models/gpt/gpt_layer_specs.py` of PaddleFleet 0.3:

- `config.specific_layer` is the class of the text layers;
- `get_gpt_spec` fixes the class of the embedding.
"""

from paddle.distributed.fleet.meta_parallel import LayerSpec
from paddlefleet.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from paddlefleet.models.gpt.gpt_embedding import GPTEmbedding, GPTEmbeddingSpec
from paddlefleet.models.gpt.gpt_model import GPTModel, GPTSublayersSpec
from paddlefleet.models.gpt.lm_head import GPTLMHead
from paddlefleet.transformer.transformer_layer import TransformerLayer


def get_gpt_layer_local_spec(config=None, layer_number=1):
    return LayerSpec(
        layer=getattr(config, "specific_layer", TransformerLayer),
        extra_kwargs={"config": config, "layer_number": layer_number},
    )


def get_gpt_spec(
    config,
    transformer_layers_spec,
    mtp_layers_spec,
    vocab_size,
    max_sequence_length,
    head_empty_layers_spec=None,
    tail_empty_layers_spec=None,
    position_embedding_type="learned_absolute",
):
    return LayerSpec(
        layer=GPTModel,
        extra_kwargs={"config": config, "tie_word_embeddings": False},
        sublayers_spec=GPTSublayersSpec(
            embedding=LayerSpec(
                layer=GPTEmbedding,
                sublayers_spec=GPTEmbeddingSpec(LayerSpec(layer=LanguageModelEmbedding)),
                extra_kwargs={
                    "config": config,
                    "vocab_size": vocab_size,
                    "max_sequence_length": max_sequence_length,
                    "position_embedding_type": position_embedding_type,
                },
            ),
            head_empty_layers=head_empty_layers_spec,
            transformer_layers=transformer_layers_spec,
            tail_empty_layers=tail_empty_layers_spec,
            lm_head=LayerSpec(layer=GPTLMHead, extra_kwargs={"config": config}),
        ),
    )
