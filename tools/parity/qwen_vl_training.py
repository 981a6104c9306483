"""The golden training trajectory: AdamW on one batch, decay on every parameter, clipping at 1."""

from paddle_vl.config.schema import TrainConfig
from paddle_vl.families.qwen3_vl.objective import VLBatchAdapter, VLLoss
from paddle_vl.train.freeze import decayed_names
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.step import ModelRunner, counted, train_step

_SETTINGS = TrainConfig(
    output_dir="unused",
    learning_rate=1e-3,
    adam_beta2=0.95,
    weight_decay=0.1,
    weight_decay_exclude=[],
    max_grad_norm=1.0,
)


def train_steps(model, batch: dict, num_steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm before clipping of each step, by the package's own training step."""
    parameters = list(model.hf_named_parameters())
    optimizer = Optimizer(parameters, _SETTINGS, decayed_names(dict(parameters), []))
    batch = batch | {"num_target_tokens": int((batch["labels"][:, 1:] != -100).sum())}
    runner = ModelRunner(model, VLLoss(), VLBatchAdapter())
    micro_batches = [counted(batch, runner.adapter)]
    steps = [
        train_step(runner, optimizer, micro_batches, _SETTINGS.learning_rate)
        for _ in range(num_steps)
    ]
    return [(float(step.terms[0]), float(step.grad_norm)) for step in steps]
