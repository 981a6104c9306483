"""Feeds a training step with its micro-batches as tensors, prefetched to a GPU.

Also warns about long waits for data while they last (`warning_of_wait`).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import paddle

from paddle_vl.batch.schema import Batch, HostBatch
from paddle_vl.data.prefetch import PrefetchingLoader
from paddle_vl.threads import Watch
from paddle_vl.train.feeding.device_copies import DeviceCopies
from paddle_vl.train.phases import Phase, phase

logger = logging.getLogger(__name__)


class DataPlace(NamedTuple):
    """Position in the training data.

    Attributes:
        state: state dict of the data at this position.
        passes: passes over the data so far.
        skipped: bad samples left out so far.
    """

    state: dict[str, Any]
    passes: float
    skipped: int

    @classmethod
    def of(cls, data: PrefetchingLoader) -> "DataPlace":
        passes = data.epoch + data.batches_consumed / max(1, len(data))
        return cls(data.state_dict(), passes, sum(data.skipped.values()))


class FedStep(NamedTuple):
    """The micro-batches of a step.

    Attributes:
        micro_batches: on the device; with `DeviceCopies` valid until the next step but one is
            requested.
        place: data position after these micro-batches, however many were prefetched.
        data_wait_s: seconds that the step waited for them.
    """

    micro_batches: Sequence[HostBatch]
    place: DataPlace
    data_wait_s: float


class BatchFeed:
    """Fetches the micro-batches of each step; on a GPU one step ahead of the running one.

    Call `next_step`, launch forward and backward passes, call `prepare_next`; all from one thread.

    Args:
        num_micro_batches: per step.
        num_steps: of the whole run; nothing is prefetched beyond them. None if the run ends with
            a number of tokens.
        wait_warning_s: seconds of waiting for data before a warning.
        copies: copies to the device; None without prefetching.
        count_flops: FLOPs of a batch; None to not count them.

    Attributes:
        steps_fed: steps returned so far, of the whole run.
    """

    def __init__(
        self,
        data: PrefetchingLoader,
        num_micro_batches: int,
        num_steps: int | None,
        *,
        wait_warning_s: float = 30.0,
        copies: DeviceCopies | None = None,
        count_flops: Callable[[Batch], int] | None = None,
    ):
        self._data = data
        self._num_micro_batches, self._num_steps = num_micro_batches, num_steps
        self._copies, self._count_flops = copies, count_flops
        self._wait_warning_s = wait_warning_s
        self._next: FedStep | Exception | None = None
        self.steps_fed = 0

    def continue_at(self, steps_fed: int, data_state: dict[str, Any]) -> None:
        """Resume after `steps_fed` steps, with the data at a saved position."""
        self._next, self.steps_fed = None, steps_fed
        self._data.load_state_dict(data_state, steps_fed * self._num_micro_batches)

    def next_step(self) -> FedStep:
        """The micro-batches of the next step, on the device or being copied there.

        Raises:
            Exception: what the data raised, also if that was while prefetching.
        """
        fed, self._next = self._next, None
        if fed is None:
            fed = self._fetch(is_ahead=False)
        elif isinstance(fed, Exception):
            raise fed
        if self._copies is not None:
            self._copies.wait()
        self.steps_fed += 1
        return fed

    def prepare_next(self) -> None:
        """Prefetch and copy the next step's micro-batches while the launched step runs.

        Does nothing without device copies: loader workers prefetch by themselves.
        """
        if self._copies is not None:
            self.upcoming()

    def upcoming(self) -> Sequence[Batch]:
        """The batches of the next step, fetched now, after the running step's forward and backward
        passes were launched. Empty after the last step, and where the data raised: `next_step`
        raises that."""
        is_last = self._num_steps is not None and self.steps_fed >= self._num_steps
        if self._next is None and not is_last:
            try:
                self._next = self._fetch(is_ahead=True)
            except Exception as error:
                # Raised by `next_step`: reports and checkpoints of the running step come first.
                self._next = error
        return self._next.micro_batches if isinstance(self._next, FedStep) else []

    def entries(self) -> dict[str, Any]:
        """Entries of a metrics line."""
        return {}

    def check(self, line: dict[str, Any]) -> None:
        """Raise an error for a metrics line with which the run cannot go on."""

    def shown(self) -> list[dict[str, Any]]:
        """Lines of predictions of this step."""
        return []

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint stores besides the place in the data. Called by all ranks."""

    @staticmethod
    def write(folder: Path, state: dict[str, Any]) -> None:
        """Write what of a state is in files of its own."""

    def restore(self, folder: Path, state: dict[str, Any] | None) -> None:
        """Continue from the state of a checkpoint."""

    def close(self) -> None:
        """Stop loader and copies; prefetched micro-batches are dropped."""
        self._next = None
        self._data.close()
        if self._copies is not None:
            self._copies.close()

    def _fetch(self, is_ahead: bool) -> FedStep:
        copies, flops = self._copies, self._count_flops
        if copies is not None and self.steps_fed:
            copies.launched()
        begin = time.perf_counter()
        who = f"step {self.steps_fed + 1}"
        with (
            phase(Phase.DATA_WAIT),
            warning_of_wait(self._wait_warning_s, self._data.waiting_for, who),
        ):
            batches = [next(self._data) for _ in range(self._num_micro_batches)]
        wait_s = time.perf_counter() - begin
        if is_ahead and copies is not None and not copies.is_idle():
            # The device was busy throughout, so the wait delayed nothing.
            wait_s = 0.0
        place = DataPlace.of(self._data)
        if flops is not None:
            batches = [batch | {"flops": flops(batch)} for batch in batches]
        # Nothing refers to the arrays after this, so a CPU has their memory for the step.
        with phase(Phase.HOST_TO_DEVICE):
            if copies is None:
                batches = [
                    batch.placed(lambda _, array: paddle.to_tensor(array)) for batch in batches
                ]
            else:
                batches = copies.start(batches)
        return FedStep(batches, place, wait_s)


@contextmanager
def warning_of_wait(after_s: float, describe: Callable[[], str], who: str) -> Iterator[None]:
    """Around a wait for data: logs a warning while it lasts longer than `after_s`, again whenever
    the time has doubled, and a message when it is over.

    Args:
        describe: describes what is waited for; called in the watching thread.
        who: what waits, for the messages: `step 7`.
    """
    begin, told_s, is_over = time.monotonic(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal told_s
        next_s = after_s
        while not is_over.wait(begin + next_s - time.monotonic()):
            logger.warning("%s has waited %.3g s for data: %s", who, next_s, describe())
            told_s, next_s = next_s, 2 * next_s

    thread = Watch(watch, "data-wait")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if told_s:
        waited_s = time.monotonic() - begin
        logger.warning("%s goes on: its data came after %.3g s", who, waited_s)


def watched(data: PrefetchingLoader, after_s: float, who: str) -> Iterator[Any]:
    """The same batches, with `warning_of_wait` around each wait."""
    batches = iter(data)
    while True:
        with warning_of_wait(after_s, data.waiting_for, who):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
