"""STAND-IN. Contract of `src/paddlefleet/models/common/embeddings/language_model_embedding.py`:
`embed_tokens`, `embedding_weight`, `tp_group`, and a call with `input_ids` and `position_ids`.

The table is not divided over ranks; `GPTEmbedding` cuts the sequence after the images are placed.
"""

import numpy as np
import paddle
from paddle import nn
from paddlefleet.parallel_state import get_tensor_model_parallel_group


class LanguageModelEmbedding(nn.Layer):
    def __init__(self, config, vocab_size, max_sequence_length, position_embedding_type):
        super().__init__()
        self.tp_group = get_tensor_model_parallel_group(check_initialized=False)
        self.embed_tokens = nn.Embedding(vocab_size, config.hidden_size)
        table = np.random.default_rng(1).standard_normal([vocab_size, config.hidden_size])
        self.embed_tokens.weight.set_value(paddle.to_tensor(table.astype("float32")))

    @property
    def embedding_weight(self):
        return self.embed_tokens.weight

    def forward(self, input_ids, position_ids):
        return self.embed_tokens(input_ids)
