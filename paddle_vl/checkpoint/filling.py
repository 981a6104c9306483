"""Models that are built without storage, and whose parameters get their values one by one.

Whoever divides a model over processes takes his share of each parameter before the next one is
there, so that no process holds more than its share and one tensor.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from paddle import Tensor


class FillStep(NamedTuple):
    """What gives one parameter its value.

    Attributes:
        parameter: None where this process has none and others do: random numbers are drawn, so
            that those behind them are the same everywhere.
        give: called once, in turn.
    """

    parameter: Tensor | None
    give: Callable[[], None]


class Fillable:
    """Of an `nn.Layer` whose parameters may still be without values."""

    _sources: list[Callable[[], Iterable[FillStep]]] | None = None

    def fill_later(self, steps: Callable[[], Iterable[FillStep]]) -> None:
        """Told once, behind the building under `paddle.LazyGuard`, where values come from.

        Args:
            steps: asked for when the model is filled, for the parameters that it has then.
        """
        self._sources = [steps]

    def fill_too(self, steps: Callable[[], Iterable[FillStep]]) -> None:
        """Values of parameters that were added, or others for those that are there.

        They are given at once if the model has its values already.
        """
        if self._sources is None:
            for step in steps():
                step.give()
        else:
            self._sources.append(steps)

    def fill(self) -> Iterator[Tensor]:
        """Every parameter once, in the same order on all ranks; those without a value get it when
        their turn comes, after whoever asks for them is done with the one before."""
        sources, self._sources = self._sources or [], None
        steps = [step for source in sources for step in source()]
        # A later step for the same parameter stands in place of the earlier one.
        last = {id(step.parameter): step for step in steps}
        filled = set()
        for step in steps:
            if step.parameter is None:
                step.give()
            elif last[id(step.parameter)] is step:
                step.give()
                filled.add(id(step.parameter))
                yield step.parameter
        yield from (p for p in self.parameters() if id(p) not in filled)

    def fill_all(self) -> None:
        """Give all parameters their values, whole."""
        for _ in self.fill():
            pass
