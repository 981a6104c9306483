"""The golden training trajectory: AdamW on one batch, decay on every parameter, clipping at 1."""

import paddle
from paddle_vl.train.optimizer import clip_by_global_norm

_SETTINGS = {
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-8,
    "weight_decay": 0.1,
}


def train_steps(model, batch: dict, num_steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm before clipping of each step."""
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters(), **_SETTINGS)
    found = []
    for _ in range(num_steps):
        loss = model(**batch).loss
        loss.backward()
        norm = clip_by_global_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        found.append((loss.item(), float(norm.item())))
    return found
