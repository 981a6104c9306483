"""Visual indices in PaddleFleet: computed once per step, used by the merge and every level.

    spec = install(get_gpt_spec(...))  # the embedding and the text layers of Qwen3-VL's decoder

`IndexedGPTEmbedding` is `GPTEmbedding` with the two index lists; `indexed_text_layer(parent)` makes
a text layer that uses them; `install(spec)` sets both. PaddleFleet is imported when a class is
asked for, never by importing this module. docs/paddlefleet.md says what changes and how to compare.
"""

from typing import Any

from paddle_vl.integrations.paddlefleet.embedding import indexed_embedding, published
from paddle_vl.integrations.paddlefleet.text_layer import (
    DEEPSTACK_KEYS,
    indexed_text_layer,
    install,
)

__all__ = ["DEEPSTACK_KEYS", "indexed_embedding", "indexed_text_layer", "install"]


def __getattr__(name: str) -> Any:
    # Not in __all__, so that a star import works without PaddleFleet.
    if name == "IndexedGPTEmbedding":
        return indexed_embedding(published("models.gpt.gpt_embedding").GPTEmbedding)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
