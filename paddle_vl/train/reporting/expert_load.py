"""How evenly a model's experts are used, for the metrics of a run."""

from typing import Any

import numpy as np
import paddle
from paddle import Tensor


def expert_counts(model: Any) -> Tensor | None:
    """Token rows per expert of this process' last micro-batch, `[L, E]` int64, or None without.

    Padding is counted: experts work on it too. Layers that other processes have are 0.
    """
    text = model.config.text_config
    layers = [i for i in range(text.num_hidden_layers) if text.has_experts(i)]
    if not layers:
        return None
    own, none = model.tokens_per_expert(), paddle.zeros([text.num_experts], dtype="int64")
    return paddle.stack([own.get(i, none) for i in layers])


def load_summary(counts: np.ndarray) -> dict[str, float]:
    """`tokens_per_expert_min`, `_mean` and `_max` over the experts of all layers.

    Args:
        counts: added up over the parts of the data.
    """
    return {
        "tokens_per_expert_min": int(counts.min()),
        "tokens_per_expert_mean": round(float(counts.mean()), 1),
        "tokens_per_expert_max": int(counts.max()),
    }
