"""Visual indices in PaddleFleet: computed once per step, used by the merge and every level.

    switch_on()  # before the model is built: for all models that PaddleFleet's builders make

`IndexedGPTEmbedding` is `GPTEmbedding` with the two index lists; `indexed_text_layer(parent)` makes
a text layer that uses them; `install(spec)` sets both in one spec, `switch_on()` in every one.
PaddleFleet is imported when it is asked for, never by importing this module. docs/paddlefleet.md
says what changes and how to compare.
"""

from typing import Any

from paddle_vl.integrations.paddlefleet.embedding import indexed_embedding
from paddle_vl.integrations.paddlefleet.sources import published
from paddle_vl.integrations.paddlefleet.specs import install, switch_on
from paddle_vl.integrations.paddlefleet.text_layer import DEEPSTACK_KEYS, indexed_text_layer

__all__ = ["DEEPSTACK_KEYS", "indexed_embedding", "indexed_text_layer", "install", "switch_on"]


def __getattr__(name: str) -> Any:
    # Not in __all__, so that a star import works without PaddleFleet.
    if name == "IndexedGPTEmbedding":
        return indexed_embedding(published("models.gpt.gpt_embedding").GPTEmbedding)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
