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

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.batch.schema import OTHER_LANES, Batch
from paddle_vl.nn.flat_buckets import FlatBucket
from paddle_vl.nn.linear import gradient_of
from paddle_vl.nn.master_weights import MasterWeights, ParameterStore
from paddle_vl.nn.parameter_table import Spread
from paddle_vl.parallel.colocated.bridge import Bridge, Encoded
from paddle_vl.parallel.colocated.encoder import ItemEncoder
from paddle_vl.parallel.colocated.grid import EncoderGroups
from paddle_vl.parallel.colocated.host_rows import HostRows
from paddle_vl.parallel.pipeline.runner import PipelineRunner
from paddle_vl.parallel.sharding import Sharding, ShardingOptions
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
        self.encoder, self.groups = encoder, groups
        gradient_group = groups.lane_group if ranks_use_other_rows else topology.pp_group
        self.bridge = Bridge(encoder, groups, gradient_group)
        self._sections = [frozenset(encoder.sections_of(chunk)) for chunk in self.chunks]
        self._leaves: Leaves | None = None
        self._host_rows = HostRows() if offloads_rows else None
        # The next step's batches, for a frozen encoder; set by the trainer.
        self.upcoming: Callable[[], Sequence[Batch]] | None = None
        self._ahead: tuple[Sequence[Batch], Encoded] | None = None

    def accumulate_gradients(
        self,
        batches: Sequence[Batch],
        totals: Sequence[int],
        store: ParameterStore | None = None,
        num_sources: int = 0,
    ) -> Tensor:
        trained = [p for p in self.encoder.parameters() if not p.stop_gradient]
        with self.marked():
            encoded = self._encode(batches, bool(trained))
        terms = super().accumulate_gradients(batches, totals, store, num_sources)
        with self.marked():
            if trained:
                self._backward(encoded, batches, trained)
            else:
                self._read_ahead()
        self._leaves = None
        return terms

    @paddle.no_grad()
    def values(self, batches: Sequence[Batch], of: Callable[[Any], Tensor]) -> list[Tensor]:
        self._encode(batches, trains=False)
        found = super().values(batches, of)
        self._leaves = None
        return found

    def _encode(self, batches: Sequence[Batch], trains: bool) -> Encoded:
        if trains:
            # It has no graph: the encoder is trained from this step on.
            self._ahead = None
        encoded = self._encoded_ahead(batches)
        if encoded is None:
            encoded = self.bridge.encode(self._lanes(batches), trains)
        used = frozenset().union(*(self._sections[number] for number in self.own_chunks))
        self._leaves = Leaves(
            self.bridge.exchange(encoded),
            encoded.num_rows[self.bridge.own_lane].tolist(),
            self.encoder.section_widths,
            used,
            trains,
            self._host_rows,
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
        if self._ahead is None or len(self._ahead[0]) != len(batches):
            return None
        # A batch may have got further entries since.
        for ahead, batch in zip(self._ahead[0], batches, strict=True):
            if any(batch.get(name) is not value for name, value in ahead.items()):
                return None
        (_, encoded), self._ahead = self._ahead, None
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
            if gradient_of(parameter) is None:
                parameter.grad = paddle.zeros_like(parameter)

    def _lanes(self, batches: Sequence[Batch]) -> list[list[Any]]:
        """The micro-batches of each served data lane."""
        others = [[*batch.get(OTHER_LANES, ())] for batch in batches]
        lanes: list[list[Any]] = []
        for number in range(len(self.groups.role.served_lanes)):
            if number == self.bridge.own_lane:
                lanes.append(list(batches))
            else:
                lanes.append([each.pop(0) if each else {} for each in others])
        return lanes

    def _batch_of(self, number: int, micro_batch: int) -> Any:
        batch = super()._batch_of(number, micro_batch)
        assert self._leaves is not None
        # An evaluation repeats its last batch to fill some schedules.
        micro_batch = min(micro_batch, len(self._leaves.rows_of_batch) - 1)
        sections = self._leaves.sections(micro_batch, self._sections[number])
        return self.encoder.language_batch(batch, sections)

    def _end_micro_batch(self) -> None:
        super()._end_micro_batch()
        if self._leaves is not None:
            self._leaves.collect()


class Leaves:
    """Rows of a step on this rank, detached from the encoder, and the gradients that the language
    model leaves on them.

    A leaf per micro-batch and section: slices of one leaf inside the graph would cost twice its
    bytes in the backward pass. Only the sections that this stage uses are kept. Shapes: R rows of
    the step in this data lane, C the width of all sections.

    Args:
        full_RC: the rows of all micro-batches.
        rows_of_batch: number of rows of each micro-batch.
        widths: of the sections.
        used: sections that this stage uses.
        needs_gradient: whether the encoder is trained.
        host_rows: where to keep rows until a micro-batch begins, and gradients once it ends; None
            for the device.
    """

    @paddle.no_grad()
    def __init__(
        self,
        full_RC: Tensor,
        rows_of_batch: Sequence[int],
        widths: Sequence[int],
        used: Collection[int],
        needs_gradient: bool,
        host_rows: HostRows | None = None,
    ):
        self.rows_of_batch, self.widths = list(rows_of_batch), list(widths)
        self._dtype, self._needs_gradient, self._host = full_RC.dtype, needs_gradient, host_rows
        # Rows by micro-batch and section, and gradients that are on the host.
        self._rows: dict[tuple[int, int], Callable[[], Tensor]] = {}
        self._gradients: dict[tuple[int, int], Callable[[], Tensor]] = {}
        self._leaves: dict[tuple[int, int], Tensor] = {}
        ends, start = [sum(widths[: i + 1]) for i in range(len(widths))], 0
        for number, count in enumerate(rows_of_batch):
            for section in sorted(used) if count else ():
                end = ends[section]
                rows = full_RC[start : start + count, end - widths[section] : end].clone()
                key = (number, section)
                self._rows[key] = rows.detach if host_rows is None else host_rows.put(key, rows)
            start += count

    def sections(self, number: int, wanted: Collection[int]) -> dict[int, Tensor]:
        """The leaves of a micro-batch; empty for one without rows."""
        if not self.rows_of_batch[number]:
            return {}
        return {section: self._leaf(number, section) for section in wanted}

    def collect(self) -> None:
        """After a backward pass: with offloading, move finished gradients to the host."""
        if self._host is None:
            return
        for key, leaf in list(self._leaves.items()):
            if leaf.grad is not None:
                self._gradients[key] = self._host.put((*key, "gradient"), leaf.grad)
                del self._leaves[key]

    @paddle.no_grad()
    def gradient(self) -> Tensor:
        """`[R, C]`: this rank's gradients, zeros where it has none. Drops the leaves."""
        parts = []
        for number, count in enumerate(self.rows_of_batch):
            if count:
                columns = [self._gradient(number, s, count) for s in range(len(self.widths))]
                parts.append(paddle.concat(columns, axis=1))
        self._leaves.clear()
        self._gradients.clear()
        self._rows.clear()
        if not parts:
            return paddle.zeros([0, sum(self.widths)], dtype=self._dtype)
        return paddle.concat(parts)

    def _leaf(self, number: int, section: int) -> Tensor:
        key = number, section
        leaf = self._leaves.get(key)
        if leaf is None:
            leaf = self._rows[key]()
            if self._needs_gradient:
                leaf.stop_gradient = False
                self._leaves[key] = leaf
        return leaf

    def _gradient(self, number: int, section: int, count: int) -> Tensor:
        key = number, section
        if key in self._gradients:
            return self._gradients[key]()
        leaf = self._leaves.get(key)
        if leaf is None or leaf.grad is None:
            return paddle.zeros([count, self.widths[section]], dtype=self._dtype)
        return leaf.grad


class PartsStore:
    """Language model and encoder, whose gradients are reduced over different ranks.

    A `ParameterStore`. The encoder has one backward pass per step, after the last micro-batch.

    Args:
        language, encoder: their stores.
        encoder_parameters: the encoder's parameters.
    """

    def __init__(
        self,
        language: ParameterStore,
        encoder: ParameterStore,
        encoder_parameters: Iterable[Tensor],
    ):
        self.language, self.encoder, self.stage = language, encoder, language.stage
        self._of_encoder = {id(parameter): parameter for parameter in encoder_parameters}

    def shard_of(self, parameter: Tensor) -> Tensor | None:
        return self._store_of(parameter).shard_of(parameter)

    def own_shard(self, parameter: Tensor, full: np.ndarray) -> np.ndarray:
        return self._store_of(parameter).own_shard(parameter, full)

    def gathered_value(self, parameter: Tensor) -> Tensor:
        return self._store_of(parameter).gathered_value(parameter)

    def spread(self, parameter: Tensor, value: Tensor | None = None) -> Spread:
        return self._store_of(parameter).spread(parameter, value)

    def use_buckets(self, buckets: Sequence[FlatBucket]) -> None:
        """Never called: each part's optimizer gives its buckets to the part's store."""
        raise RuntimeError("the buckets of a part belong to the store of the part")

    def begin_step(self, num_micro_batches: int) -> None:
        self.language.begin_step(num_micro_batches)
        self.encoder.begin_step(1)

    def end_micro_batch(self) -> None:
        """After a backward pass of the language model."""
        self.language.end_micro_batch()

    def end_backward(self) -> None:
        """After the encoder's backward pass. In a step without items no rank has gradients of the
        encoder, so that nothing is reduced and its state does not decay, as on one device."""
        self.language.end_backward()
        if any(gradient_of(parameter) is not None for parameter in self._of_encoder.values()):
            self.encoder.end_micro_batch()
            self.encoder.end_backward()

    def all_gather_parameters(self) -> None:
        self.language.all_gather_parameters()
        self.encoder.all_gather_parameters()

    def _store_of(self, parameter: Tensor) -> Any:
        return self.encoder if id(parameter) in self._of_encoder else self.language


def encoder_store(parameters: Iterable[Tensor], groups: EncoderGroups) -> ParameterStore:
    """The store of an encoder: master weights, or with `encoder.sharding_stage` 1 shards of the
    optimizer state over the encoder's lanes; gradients are then reduce-scattered once per step."""
    parameters = list(parameters)
    if not groups.shards_state or all(parameter.stop_gradient for parameter in parameters):
        return MasterWeights(parameters)
    options = ShardingOptions(reduce_once_per_step=True)
    return Sharding(parameters, groups.dp_group, stage=2, options=options)
