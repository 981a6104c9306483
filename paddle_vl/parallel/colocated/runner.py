"""The three phases of a step under the colocated schedule.

1. Every rank encodes its share of the items of all micro-batches, and the bridge brings the rows to
   the data lanes that use them.
2. The language model runs its pipeline over detached rows.
3. The bridge brings the gradients of the rows back, and every rank runs the encoder's backward
   pass.

Gradients of the encoder are summed over its lanes after phase 3, with those of the language model
over theirs; both are sums of losses that are divided by the counts of the full step. A frozen
encoder has no phase 3, and encodes the items of the next step there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import paddle
from paddle import Tensor

from paddle_vl.batch.schema import Batch
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.parallel.colocated.bridge import Bridge, Encoded
from paddle_vl.parallel.colocated.encoder import OTHER_LANES, ItemEncoder
from paddle_vl.parallel.colocated.leaves import Leaves
from paddle_vl.parallel.pipeline.runner import PipelineRunner
from paddle_vl.parallel.topology import Topology


class ColocatedRunner(PipelineRunner):
    """A `PipelineRunner` whose encoder runs on all ranks, before and after the pipeline.

    Args:
        args, settings: of `PipelineRunner`.
        encoder: of the model's family.
        topology: with the encoder's groups.
        ranks_use_other_rows: whether mp ranks use different rows (sequence parallelism).
        offloads_rows: keep rows and their gradients in host memory between the phases.
    """

    def __init__(
        self,
        *args: Any,
        encoder: ItemEncoder,
        topology: Topology,
        ranks_use_other_rows: bool = False,
        offloads_rows: bool = False,
        **settings: Any,
    ):
        super().__init__(*args, **settings)
        groups = topology.encoder
        assert groups is not None, "the colocated schedule needs the encoder's groups"
        self.encoder, self.groups, self.offloads_rows = encoder, groups, offloads_rows
        gradient_group = groups.lane_group if ranks_use_other_rows else topology.pp_group
        self.bridge = Bridge(encoder, groups, gradient_group)
        self._sections = [frozenset(encoder.sections_of(chunk)) for chunk in self.chunks]
        self._leaves: Leaves | None = None
        # The next step's batches, for a frozen encoder; set by the trainer.
        self.upcoming: Callable[[], Sequence[Batch]] | None = None
        self._ahead: tuple[Sequence[Batch], Encoded] | None = None

    def accumulate_gradients(
        self,
        batches: Sequence[Batch],
        totals: Sequence[int],
        store: ParameterStore | None = None,
    ) -> Tensor:
        """See `PipelineRunner`. If a phase raises, no gradient of the step stays behind."""
        trained = [p for p in self.encoder.parameters() if not p.stop_gradient]
        try:
            with self.marked():
                encoded = self._encode(batches, bool(trained))
            terms = super().accumulate_gradients(batches, totals, store)
            with self.marked():
                if trained:
                    self._backward(encoded, batches, trained)
                else:
                    self._read_ahead()
            return terms
        except BaseException:
            self._drop_gradients(store)
            raise
        finally:
            self._leaves = None

    @paddle.no_grad()
    def loss_sums(self, batches: Sequence[Batch]) -> Tensor:
        try:
            self._encode(batches, trains=False)
            return super().loss_sums(batches)
        finally:
            self._leaves = None

    def _encode(self, batches: Sequence[Batch], trains: bool) -> Encoded:
        encoded = self._encoded_ahead(batches)
        if encoded is None:
            encoded = self.bridge.encode(self._lanes(batches), trains)
        used = frozenset().union(*(self._sections[number] for number in self.own_chunks))
        self._leaves = Leaves(
            self.bridge.exchange(encoded),
            encoded.rows_of_batch,
            self.encoder.section_widths,
            used,
            trains,
            self.offloads_rows,
        )
        if not trains:
            # The leaves are copies.
            encoded.output = None
        return encoded

    def _read_ahead(self) -> None:
        """Encode this rank's items of the next step while other stages still run this one.

        Without collectives: a rank whose data fails would leave the others waiting. So not with a
        divided encoder, and the rows are exchanged in the next step.
        """
        if self.upcoming is None or self.groups.mp_group.nranks > 1:
            return
        batches = self.upcoming()
        if batches:
            self._ahead = batches, self.bridge.encode(self._lanes(batches), trains=False)

    def _encoded_ahead(self, batches: Sequence[Batch]) -> Encoded | None:
        """What `_read_ahead` has encoded, if it is of these batches."""
        if self._ahead is None:
            return None
        ahead, encoded = self._ahead
        if len(ahead) != len(batches) or not all(map(_is_same, ahead, batches)):
            return None
        self._ahead = None
        return encoded

    def _backward(
        self, encoded: Encoded, batches: Sequence[Batch], trained: Sequence[Tensor]
    ) -> None:
        assert self._leaves is not None
        gradient_RC, self._leaves = self._leaves.gradient(), None
        self.bridge.backward(encoded, gradient_RC)
        if not any(self.encoder.has_items_anywhere(batch) for batch in batches):
            return
        # Ranks without items take part in the sums.
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = paddle.zeros_like(parameter)

    def _lanes(self, batches: Sequence[Batch]) -> list[list[Any]]:
        """The micro-batches of each served data lane."""
        role = self.groups.role
        own = role.served_lanes.index(role.place.lane)
        others = [batch.get(OTHER_LANES, ()) for batch in batches]
        lanes: list[list[Any]] = []
        for number in range(len(role.served_lanes)):
            if number == own:
                lanes.append(list(batches))
            else:
                place = number - (number > own)
                lanes.append([each[place] if each else {} for each in others])
        return lanes

    def _batch_of(self, number: int, micro_batch: int) -> Any:
        batch = super()._batch_of(number, micro_batch)
        assert self._leaves is not None
        # An evaluation repeats its last batch to fill some schedules.
        micro_batch = min(micro_batch, len(self._leaves.rows_of_batch) - 1)
        batch = {name: value for name, value in batch.items() if name != OTHER_LANES}
        sections = self._leaves.sections(micro_batch, self._sections[number])
        return self.encoder.language_batch(batch, sections)

    def _end_micro_batch(self) -> None:
        super()._end_micro_batch()
        if self._leaves is not None:
            self._leaves.collect()

    def _drop_gradients(self, store: ParameterStore | None) -> None:
        """Forget what the micro-batches of a failed step have left."""
        self._store = None
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.clear_gradient(False)
        if store is not None:
            for total in store.gradient_sums():
                total.zero_()


def _is_same(batch: Mapping[str, Any], later: Mapping[str, Any]) -> bool:
    """Whether a batch has become another one by added entries alone."""
    return all(later.get(name) is value for name, value in batch.items())
