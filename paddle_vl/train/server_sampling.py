"""Sampled answers of a server, which is handed the trained weights between generations.

One rank of each data lane asks for the answers to its prompts. All ranks write the weights into a
folder, as at the end of a run, and one has the server load it.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paddle_vl.parallel.ranks import SingleRank


class ServerSampler:
    """Answers prompts at the server of rollouts. All ranks call it together.

    Args:
        rollouts: see `paddle_vl.train.rollouts`, with a `server`.
        is_adapter: whether these are of adapters alone.

    Attributes:
        write: writes the weights of a step into the folder, on all ranks.
    """

    def __init__(self, rollouts: Any, ranks: SingleRank, is_adapter: bool):
        self._rollouts, self._ranks, self._is_adapter = rollouts, ranks, is_adapter
        self.write: Callable[[Path, int], object] = lambda folder, step: None
        # Step of the weights that the server has.
        self._step: int | None = None

    def hand_over(self, step: int) -> None:
        """Before a generation: give the server the weights, if its own are old.

        Raises:
            RuntimeError: it does not take them, the same on all ranks.
        """
        server, ranks = self._rollouts.server, self._ranks
        if self._step is not None and step - self._step < server.sync_steps:
            return
        if ranks.is_main:
            shutil.rmtree(server.folder, ignore_errors=True)
        self.write(server.folder, step)
        self._told(ranks.is_main, lambda: server.load(self._is_adapter))
        self._step = step

    def __call__(self, prompts: Sequence[Any]) -> list[list[Any]]:
        """The answers to each prompt.

        Raises:
            RuntimeError: there are none, the same on all ranks.
        """
        rollouts, own = self._rollouts, self._ranks.data_rank

        def asked() -> Any:
            return [own, rollouts.told_sampled(rollouts.asked(prompts))]

        told = self._told(self._ranks.counts_data, asked)
        return next(rollouts.sampled_of(answers) for rank, answers in told if rank == own)

    def _told(self, does: bool, work: Callable[[], Any]) -> list[Any]:
        """What some work of the ranks that do it returns, by rank."""
        found, problem, cause = None, None, None
        if does:
            try:
                found = work()
            except (RuntimeError, ValueError, OSError) as error:
                problem, cause = f"{error}", error
        told = self._ranks.gathered([found, problem])
        if problems := [each for _, each in told if each is not None]:
            raise RuntimeError(problems[0]) from cause
        return [each for each, _ in told if each is not None]
