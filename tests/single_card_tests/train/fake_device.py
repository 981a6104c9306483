"""A fake GPU for `DeviceCopies`: tensors are on the CPU, events are simulated."""

import numpy as np
import paddle


class FakeEvent:
    def __init__(self, name: str):
        self.name, self.has_happened = name, False

    def query(self) -> bool:
        return self.has_happened

    def synchronize(self) -> None:
        self.has_happened = True


class FakeStream:
    def __init__(self, name: str, device: "FakeDevice"):
        self.name, self.device, self.events = name, device, []

    def record_event(self) -> FakeEvent:
        self.events.append(FakeEvent(f"{self.name} {len(self.events)}"))
        self.device.log.append(f"record {self.events[-1].name}")
        return self.events[-1]

    def wait_event(self, event: FakeEvent) -> None:
        self.device.log.append(f"{self.name} waits for {event.name}")
        if self is self.device.compute:
            self.device.run_copies()


class FakeDevice:
    """Logs its calls, and copies as late as allowed: when the compute stream waits for the copy.
    Until then the memory has other values."""

    def __init__(self):
        self.log: list[str] = []
        self.compute, self.copies = FakeStream("compute", self), FakeStream("copies", self)
        self._queue: list[tuple] = []

    def pinned(self, array: np.ndarray):
        self.log.append("pin")
        return paddle.to_tensor(array)

    def empty(self, shape, dtype: str):
        self.log.append("empty")
        return paddle.full(list(shape), 77, dtype)

    def copy(self, pairs) -> None:
        self.log.append(f"copy {len(pairs)}")
        self._queue += pairs

    def run_copies(self) -> None:
        for source, target in self._queue:
            target.copy_(source, blocking=False)
        self._queue = []
