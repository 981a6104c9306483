"""How evenly a model's experts are used, for the metrics of a run."""

from typing import Any

import paddle

from paddle_vl.train.processes import SingleProcess


def expert_load(model: Any, processes: SingleProcess) -> dict[str, float]:
    """Token rows per expert in the last micro-batch, added up over the parts of the data.

    Padding is counted: experts work on it too. Called by all processes together.

    Returns:
        `tokens_per_expert_min`, `_mean` and `_max` over the experts of all layers; nothing for a
        model without experts.
    """
    text = model.config.text_config
    layers = [i for i in range(text.num_hidden_layers) if text.has_experts(i)]
    if not layers:
        return {}
    # Stages of a pipeline have counts of their own layers.
    own, none = model.tokens_per_expert(), paddle.zeros([text.num_experts], dtype="int64")
    counts_LE = processes.sum_losses(paddle.stack([own.get(i, none) for i in layers])).numpy()
    return {
        "tokens_per_expert_min": int(counts_LE.min()),
        "tokens_per_expert_mean": round(float(counts_LE.mean()), 1),
        "tokens_per_expert_max": int(counts_LE.max()),
    }
