"""The reference of bench_step_overhead.py: a training step as it was before."""

import math
import time
from collections.abc import Sequence

import numpy as np
import paddle

from paddle_vl.nn.loss import weighted_loss
from paddle_vl.train.feeding.feed import BatchFeed
from paddle_vl.train.phases import Phase, phase
from paddle_vl.train.random_state import seed_step
from paddle_vl.train.schedule import learning_rate
from paddle_vl.train.step import agree_on_step
from paddle_vl.train.trainer import Trainer


class Before:
    """The reference: steps as this repository had them before nothing was read back between steps,
    and as trainers commonly have them.

    Five sums over all processes, of the losses, the tokens, the gradient norm, a flag that says
    whether to skip the update, and the speed; the host reads each at once. The flag is read before
    the update and decides on it. Batches are copied to the device when the model is called, and
    waited for.

    Args:
        trainer: a run of its own, whose model, optimizer, data and processes are used.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        train, adapter = trainer.config.train, trainer.runner.adapter
        self._feed = BatchFeed(
            trainer.data, adapter, train.gradient_accumulation_steps, trainer.num_steps
        )
        self._losses: list[tuple[list[float], Sequence[int]]] = []

    def turn(self) -> None:
        """A step, and its line of metrics if one is due."""
        trainer, runner, optimizer = self.trainer, self.trainer.runner, self.trainer.optimizer
        processes, loss, adapter = trainer.processes, runner.loss, runner.adapter
        begin = time.perf_counter()
        micro_batches = self._feed.next_step().micro_batches
        totals = agree_on_step(micro_batches, loss, processes)
        rate = learning_rate(trainer.step, trainer.num_steps, trainer.config.train)
        seed_step(trainer.config.train.seed, trainer.step, processes)
        batches = [
            adapter.synchronized(micro_batch.batch, needed, runner.model)
            for micro_batch, needed in zip(micro_batches, totals.needed, strict=True)
        ]
        store = optimizer.store
        terms = runner.accumulate_gradients(batches, totals.counts, store)
        with phase(Phase.GRADIENT_SUM):
            store.end_backward()
            processes.sum_gradients(optimizer.tensors_with_specs)
        with phase(Phase.METRICS):
            means = processes.sum_losses(terms).tolist()
            tokens = self._summed(sum(batch.num_tokens for batch in micro_batches))
        with phase(Phase.CLIP):
            norm = math.sqrt(processes.sum_over_all(optimizer.squared_norm(processes)).item())
            skips = self._summed(not math.isfinite(weighted_loss(means, loss) + norm))
            if not skips:
                optimizer.clip_gradients(norm)
        with phase(Phase.OPTIMIZER):
            if not skips:
                optimizer.step(rate)
            optimizer.clear_gradients()
        with phase(Phase.METRICS):
            samples = sum(batch.num_samples for batch in micro_batches)
            speed = self._summed(samples / (time.perf_counter() - begin))
            trainer.step += 1
            self._losses.append((means, totals.counts))
        if trainer.step % trainer.config.logging.logging_steps == 0:
            self._report(norm, tokens, speed)

    def _summed(self, number: float) -> float:
        value = paddle.to_tensor([float(number) * self.trainer.processes.counts_data])
        return self.trainer.processes.sum_over_all(value).item()

    def _report(self, norm: float, tokens: float, speed: float) -> None:
        means, counts = (np.array(column) for column in zip(*self._losses, strict=True))
        terms = ((means * counts).sum(axis=0) / counts.sum(axis=0)).tolist()
        line = {"loss": weighted_loss(terms, self.trainer.runner.loss), "grad_norm": norm}
        line |= {"tokens": tokens, "samples_per_second": speed}
        self.trainer.reporter.write(self.trainer.step, line)
        self._losses = []
