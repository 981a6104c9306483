"""Actions from noise: the prefix once, then Euler steps of the expert over its keys and values.

Shapes: B batch, C steps of a chunk, A action values.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.families.pi07.prefix_layout import Presence

if TYPE_CHECKING:
    from paddle_vl.families.pi07.flow_matching import PI07LowLevelFlowMatching


@paddle.no_grad()
def sample_actions(
    model: "PI07LowLevelFlowMatching",
    batch: Mapping[str, Any],
    presence: Presence,
    noise: Tensor | None,
    delay: int,
    action_prefix: Tensor | None,
    num_steps: int,
) -> Tensor:
    """See `PI07LowLevelFlowMatching.sample_actions`; everything is a tensor here.

    Raises:
        ValueError: a delay without the actions that it stands for.
    """
    config = model.config
    if delay and action_prefix is None:
        raise ValueError(f"delay is {delay}: action_prefix must give the steps settled already")
    prefix = model.prefix(batch, presence, training=False)
    cache = model.decoder(prefix.embs, prefix_view=model.prefix_view(prefix), keep=True).cache
    suffix_view = model.suffix_view(prefix)
    shape = [prefix.embs.shape[0], config.chunk_size, config.max_action_dim]
    x = paddle.randn(shape, dtype="float32") if noise is None else noise
    is_settled_1C = (paddle.arange(config.chunk_size) < delay).unsqueeze(0)
    for time in times(num_steps):
        x = _with_settled(x, is_settled_1C, action_prefix)
        time_1C = paddle.logical_not(is_settled_1C).astype("float32") * float(time)
        rows, cond = model.suffix(x, time_1C, batch.get("group_index"))
        out = model.decoder(None, rows, cond, suffix_view=suffix_view, cache=cache)
        x = x + model.velocity(out.suffix, batch.get("group_index")) * float(time_step(num_steps))
    return _with_settled(x, is_settled_1C, action_prefix)


def time_step(num_steps: int) -> np.float32:
    """Negative: time runs from noise at 1 to actions at 0."""
    return np.float32(-1.0 / num_steps)


def times(num_steps: int) -> list[np.float32]:
    """The times of the Euler steps, accumulated in float32 as the original does."""
    step, time, found = time_step(num_steps), np.float32(1.0), []
    while time >= -step / 2:
        found.append(time)
        time = np.float32(time + step)
    return found


def _with_settled(x_BCA: Tensor, is_settled_1C: Tensor, action_prefix: Tensor | None) -> Tensor:
    if action_prefix is None:
        return x_BCA
    return paddle.where(is_settled_1C.unsqueeze(-1), action_prefix.astype(x_BCA.dtype), x_BCA)
