"""STAND-IN. Contract of `src/paddlefleet/models/gpt/gpt_layer_specs.py` (stored as 61486572109):

- `config.specific_layer` is the class of the text layers;
- `get_gpt_spec` fixes the class of the embedding; rotary arguments, with one for sliding windows,
  are among those of the embedding's spec.
"""

from paddle.distributed.fleet.meta_parallel import LayerSpec
from paddlefleet.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from paddlefleet.models.gpt.gpt_embedding import GPTEmbedding, GPTEmbeddingSpec
from paddlefleet.models.gpt.gpt_model import GPTModel, GPTSublayersSpec
from paddlefleet.models.gpt.lm_head import GPTLMHead
from paddlefleet.transformer.multi_token_prediction import MultiTokenPredictionLayer
from paddlefleet.transformer.transformer_layer import TransformerLayer


def get_gpt_layer_local_spec(config=None, layer_number=1, is_mtp_layer=False):
    return LayerSpec(
        layer=getattr(config, "specific_layer", TransformerLayer),
        extra_kwargs={
            "config": config,
            "layer_number": layer_number,
            "is_mtp_layer": is_mtp_layer,
            "hidden_dropout_prob": None,
        },
    )


def get_gpt_mtp_spec(config, depth):
    inner = LayerSpec(
        layer=TransformerLayer,
        extra_kwargs={"config": config, "layer_number": 50 + depth, "is_mtp_layer": True},
    )
    return LayerSpec(
        layer=MultiTokenPredictionLayer,
        sublayers_spec=inner,
        extra_kwargs={"config": config, "depth": depth},
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
    rotary_percent=1.0,
    rotary_base=10000,
    swa_rotary_base=10000,
    rope_scaling=False,
    parallel_output=False,
    tie_word_embeddings=False,
):
    embedding = {
        "config": config,
        "vocab_size": vocab_size,
        "max_sequence_length": max_sequence_length,
        "position_embedding_type": position_embedding_type,
    }
    if position_embedding_type in ("rope", "mrope"):
        embedding |= {
            "rotary_percent": rotary_percent,
            "rotary_base": rotary_base,
            "swa_rotary_base": swa_rotary_base,
            "rope_scaling": rope_scaling,
        }
    return LayerSpec(
        layer=GPTModel,
        extra_kwargs={"config": config, "tie_word_embeddings": tie_word_embeddings},
        sublayers_spec=GPTSublayersSpec(
            embedding=LayerSpec(
                layer=GPTEmbedding,
                sublayers_spec=GPTEmbeddingSpec(LayerSpec(layer=LanguageModelEmbedding)),
                extra_kwargs=embedding,
            ),
            head_empty_layers=head_empty_layers_spec,
            transformer_layers=transformer_layers_spec,
            tail_empty_layers=tail_empty_layers_spec,
            mtp=mtp_layers_spec,
            lm_head=LayerSpec(layer=GPTLMHead, extra_kwargs={"config": config}),
        ),
    )
