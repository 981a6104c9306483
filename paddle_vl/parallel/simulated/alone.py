"""What a single rank gets from ranks that do not run: its own values in another order, or what they
sent before."""

from collections.abc import Sequence

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.parallel.recorder import Collective, is_in_backward
from paddle_vl.parallel.simulated.lockstep import Meeting, RanksDisagreeError
from paddle_vl.parallel.simulated.process_group import Call


class Peers:
    """An `Exchange` in which every other rank contributes this rank's values in another order.

    Integers are contributed as they are. The orders are the same in every run.
    """

    def __init__(self, rank: int):
        self.calls: list[Collective] = []
        self._random = np.random.default_rng(rank)

    def exchange(self, rank: int, call: Call, tensor: Tensor | None) -> list[Tensor]:
        _keep(self.calls, call)
        if tensor is None:
            return []
        own = tensor.detach().clone()
        return [own if other == rank else self._like(own) for other in call.collective.ranks]

    def end(self) -> None:
        """Called at the end of the block."""

    def _like(self, own: Tensor) -> Tensor:
        if not own.is_floating_point() or own.size < 2:
            return own
        # Shuffled on the device: the host must not read the rank's values. Signs and sizes stay,
        # so that sums of exponentials are positive.
        order = paddle.to_tensor(self._random.permutation(int(own.size)))
        return paddle.index_select(own.reshape([-1]), order).reshape(own.shape)


class Replay:
    """An `Exchange` in which all ranks contribute what they did in an earlier run.

    Args:
        meetings: of this rank.
        tolerance: of this rank's contributions, relative to the largest entry.
    """

    def __init__(self, meetings: Sequence[Meeting], tolerance: float):
        self.calls: list[Collective] = []
        self._meetings, self._tolerance = meetings, tolerance
        self._contributed: list[tuple[int, Call, Tensor, Tensor]] = []

    def exchange(self, rank: int, call: Call, tensor: Tensor | None) -> list[Tensor]:
        number = len(self.calls)
        call = _keep(self.calls, call)
        if number >= len(self._meetings):
            raise RanksDisagreeError(
                f"rank {rank} starts {call.describe()} as number {number + 1}, and the traffic has "
                f"{number} collectives"
            )
        meeting = self._meetings[number]
        if meeting.call.agreed != call.agreed:
            raise RanksDisagreeError(
                f"rank {rank} starts {call.describe()} as number {number + 1}, which in the "
                f"traffic is {meeting.call.describe()}"
            )
        if tensor is not None:
            before = meeting.tensors[call.collective.ranks.index(rank)]
            # Compared at the end, since a rank may run where host reads are forbidden.
            self._contributed.append((number, call, tensor.detach().clone(), before))
        return meeting.tensors

    def end(self) -> None:
        """Check that the rank did all that it did in the earlier run.

        Raises:
            RanksDisagreeError: it contributed something else, or did less.
        """
        for number, call, now, before in self._contributed:
            if (problem := self._difference(now, before)) is not None:
                raise RanksDisagreeError(
                    f"the rank contributes {problem} to collective {number + 1}, "
                    f"{call.describe()}, compared with the traffic: the code, the weights or the "
                    "batch changed"
                )
        if len(self.calls) < len(self._meetings):
            left = self._meetings[len(self.calls)].call
            raise RanksDisagreeError(
                f"the rank ended after {len(self.calls)} collectives; in the traffic it continues "
                f"with {left.describe()}"
            )

    def _difference(self, now: Tensor, before: Tensor) -> str | None:
        if now.shape != before.shape:
            return f"{now.shape} instead of {before.shape}"
        one, other = (x.astype("float64").numpy() for x in (now, before))
        error = np.abs(one - other).max(initial=0.0)
        largest = np.abs(other).max(initial=0.0)
        # Written so that NaN differs.
        if error <= self._tolerance * largest:
            return None
        return f"values that differ by up to {error:.3g} (largest entry {largest:.3g})"


def _keep(calls: list[Collective], call: Call) -> Call:
    phase = "backward" if is_in_backward() else "forward"
    call = call._replace(collective=call.collective._replace(phase=phase))
    calls.append(call.collective)
    return call
