"""What a training step is fed with: its batches, counted, and on the device where there is one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from paddle_vl.batch.schema import Batch
from paddle_vl.families.base import BatchAdapter
from paddle_vl.train.feeding.data_wait import WaitWatch
from paddle_vl.train.feeding.device_copies import DeviceCopies
from paddle_vl.train.phases import Phase, phase
from paddle_vl.train.step import MicroBatch, counted


class TrainingData(Protocol):
    """An endless stream of training batches that knows its place; see PrefetchLoader."""

    epoch: int
    batches_consumed: int
    skipped: dict[str, int]

    def __len__(self) -> int: ...

    def __next__(self) -> Batch: ...

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def waiting_for(self) -> str:
        """What the next batch waits for, in words; from any thread."""


@dataclass(frozen=True)
class DataPlace:
    """Where a stream of batches stands.

    Attributes:
        state: to continue there.
        epoch, batches_consumed: of the next batch, and how many of its epoch were before it.
        batches_in_epoch: all batches of that epoch.
        skipped: bad samples left out so far.
    """

    state: dict[str, Any]
    epoch: int
    batches_consumed: int
    batches_in_epoch: int
    skipped: int

    @classmethod
    def of(cls, data: TrainingData) -> "DataPlace":
        return cls(
            data.state_dict(),
            data.epoch,
            data.batches_consumed,
            len(data),
            sum(data.skipped.values()),
        )

    @property
    def passes(self) -> float:
        """Passes over the data so far."""
        return self.epoch + self.batches_consumed / self.batches_in_epoch


@dataclass(frozen=True)
class FedStep:
    """The batches of a step.

    Attributes:
        micro_batches: counted; where copies are made, tensors in place of what the model computes
            with, valid until the step after the next one is asked for.
        place: right behind these batches, however many were fetched ahead.
        data_wait_s: seconds that the step had to wait for them.
    """

    micro_batches: Sequence[MicroBatch]
    place: DataPlace
    data_wait_s: float


class BatchFeed:
    """Steps' batches, one step ahead of the running one where a device runs it.

    The order of calls, all from one thread: `next_step`, the step is launched, `prepare_next`.

    Attributes:
        steps_fed: steps handed out, of the whole run.

    Args:
        num_micro_batches: of a step.
        num_steps: of the whole run; no batch beyond them is fetched ahead.
        wait_warning_s: seconds of waiting until a warning says what is waited for.
        count_flops: counts the operations of a batch; None where nobody asks.
        copies: to the device; None where batches go on as they are, and on demand.
    """

    def __init__(
        self,
        data: TrainingData,
        adapter: BatchAdapter,
        num_micro_batches: int,
        num_steps: int,
        *,
        wait_warning_s: float = 30.0,
        copies: DeviceCopies | None = None,
        count_flops: Callable[[Batch], int] | None = None,
    ):
        self._data, self._adapter = data, adapter
        self._num_micro_batches, self._num_steps = num_micro_batches, num_steps
        self._copies, self._count_flops = copies, count_flops
        self._watch = WaitWatch(wait_warning_s, data.waiting_for)
        self._next: FedStep | Exception | None = None
        self.steps_fed = 0

    def continue_at(self, steps_fed: int, data_state: dict[str, Any]) -> None:
        """Go on behind the steps of a run whose data stood there."""
        self._next = None
        self._data.load_state_dict(data_state)
        self.steps_fed = steps_fed

    def next_step(self) -> FedStep:
        """The batches of the next step, on the device or on their way there.

        Raises:
            As the data, whether it was fetched ahead or not.
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
        """The last step has been launched: fetch and copy the next one's batches beside it.

        Without copies there is nothing to do: workers are ahead by themselves, and without workers
        the time would be the same.
        """
        if self._copies is None or self._next is not None or self.steps_fed >= self._num_steps:
            return
        try:
            self._next = self._fetch(is_ahead=True)
        except Exception as error:
            # It belongs to the next step: what is due behind the running one comes first.
            self._next = error

    def close(self) -> None:
        """End what runs beside; batches that were fetched ahead are dropped."""
        self._next = None
        self._watch.close()
        self._data.close()
        if self._copies is not None:
            self._copies.close()

    def _fetch(self, is_ahead: bool) -> FedStep:
        copies, adapter = self._copies, self._adapter
        if copies is not None and self.steps_fed:
            copies.launched()
        begin = time.perf_counter()
        with phase(Phase.DATA_WAIT), self._watch.waiting(f"step {self.steps_fed + 1}"):
            batches = [next(self._data) for _ in range(self._num_micro_batches)]
        wait_s = time.perf_counter() - begin
        if is_ahead and not copies.has_run_dry():
            # The running step took longer.
            wait_s = 0.0
        place = DataPlace.of(self._data)
        micro_batches = [
            counted(adapter.prepared(batch), adapter, self._count_flops) for batch in batches
        ]
        if copies is not None:
            with phase(Phase.HOST_TO_DEVICE):
                on_device = copies.start(
                    [micro_batch.batch for micro_batch in micro_batches], adapter.is_for_device
                )
            micro_batches = [
                replace(micro_batch, batch=batch)
                for micro_batch, batch in zip(micro_batches, on_device, strict=True)
            ]
        return FedStep(micro_batches, place, wait_s)
