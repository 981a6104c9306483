"""A training step with a small model, by the engine of a run."""

from typing import Any

from paddle_vl.batch.schema import OTHER_LANES
from paddle_vl.train.build import build_engine, start_ranks
from paddle_vl.train.step import train_step


class SmallStep:
    """A rank that trains.

    Args:
        family: of `scale.families`.
    """

    def __init__(self, config: Any, family: Any):
        self.config, self.family = config, family
        self.topology, self.ranks = start_ranks(config)
        self.engine = build_engine(config, self.topology, self.ranks, family)
        self.model, self.store = self.engine.placed.built.model, self.engine.optimizer.store

    def take(self, units: int) -> int:
        """Train on micro-batches of that many units; returns how many numbers ranks agree on."""
        built = self.engine.placed.built
        batch = self.family.batch(built, units)
        if (encoder := self.topology.encoder) is not None:
            batch |= {OTHER_LANES: [batch] * (encoder.grid.lanes_out - 1)}
        micro_batches = [batch] * self.config.train.gradient_accumulation_steps
        runner, optimizer = self.engine.runner, self.engine.optimizer
        outcome = train_step(runner, optimizer, micro_batches, 1e-3, self.ranks)
        # And the stop signal.
        return outcome.totals.num_agreed + 1
