"""A source of demonstrations as a loader takes it: fields dropped, noise and times drawn."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paddle_vl.data.jsonl import FileContent
from paddle_vl.families.pi07.demonstrations.draws import FlowDraws, Stream, sample_rng
from paddle_vl.families.pi07.demonstrations.drops import (
    NO_DROPS,
    DropProbabilities,
    draw_drops,
    drop_fields,
)
from paddle_vl.families.pi07.demonstrations.sample import (
    Demonstration,
    DemonstrationShapes,
    DemonstrationSource,
)


@dataclass(frozen=True)
class DrawnDemonstrations:
    """Samples of a source with what is drawn for them in an epoch.

    The loader asks for the epoch's view of it by `in_epoch`. For evaluation leave `probabilities`
    out: nothing is dropped, and as every evaluation is an epoch 0, its draws are always the same.

    Attributes:
        probabilities: of the drops.
        flow: what is drawn for the flow loss; None for nothing, as for the planner.
        seed: of all draws.
    """

    source: DemonstrationSource
    probabilities: DropProbabilities = NO_DROPS
    flow: FlowDraws | None = None
    seed: int = 0
    epoch: int = 0

    def __post_init__(self):
        """Check that the draws fit the actions.

        Raises:
            ValueError: naming what does not.
        """
        shape = self.source.shapes.action_shape
        if self.flow is None:
            return
        if not shape or shape[0] != self.flow.chunk_size or shape[1] > self.flow.max_action_dim:
            raise ValueError(
                f"noise is drawn for {self.flow.chunk_size} steps of {self.flow.max_action_dim} "
                f"values, and the data has actions of shape {list(shape)}: the same number of "
                "steps and at most as many values are needed"
            )

    def in_epoch(self, epoch: int) -> "DrawnDemonstrations":
        """The same samples, with that epoch's draws."""
        return replace(self, epoch=epoch)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> Demonstration:
        """A sample.

        Raises:
            BadSampleError: it cannot be used, as `file:line: reason`.
        """
        place = (self.epoch, number)
        drops = draw_drops(self.probabilities, sample_rng(self.seed, Stream.DROPS, *place))
        sample = self.source.demonstration(
            number, with_history=not drops.history, with_subgoals=not drops.subgoal
        )
        sample = drop_fields(sample, drops, self.shapes)
        if self.flow is not None:
            sample |= self.flow.draw(sample_rng(self.seed, Stream.FLOW, *place))
        return sample

    def place(self, number: int) -> str:
        """Where a sample comes from: `file:line`, or its number."""
        return self.source.place(number)

    @property
    def files(self) -> Sequence[Path]:
        return self.source.files

    @property
    def shapes(self) -> DemonstrationShapes:
        return self.source.shapes

    @property
    def fields(self) -> Mapping[str, bool]:
        return self.source.fields

    @property
    def group_names(self) -> tuple[str, ...]:
        return self.source.group_names

    @property
    def on_bad_sample(self) -> str:
        return self.source.on_bad_sample

    @property
    def skipped(self) -> Counter[str]:
        return self.source.skipped

    @property
    def fingerprint(self) -> int:
        return self.source.fingerprint

    @property
    def positions_fingerprint(self) -> int:
        return self.source.positions_fingerprint

    @property
    def contents(self) -> Sequence[FileContent]:
        return self.source.contents
