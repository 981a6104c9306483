"""What one rank of a large run sends in a step, counted by running the step with small widths.

The run's own engine builds topology, layout, parameters, optimizer and runner, and takes one step,
with all layers, ranks, experts and micro-batches of the run, but few units (`scale.families`) of
little width, on a rank whose peers are not there (`scale.phantom`). Its calls are those of the run.
Their bytes are scaled:

- a call that carries parameters or gradients is known to be theirs: the sum over the parameters,
  padded as its sender pads them, has to give the recorded bytes, and with the shapes of the full
  model, built without storage, it gives the bytes of the run;
- every other call is recorded in two steps, the second with twice the units, three times the width
  and five times the tower's own, so the ratio of its bytes says whether they grow with units, one
  of the widths, both or neither. A call that grows in another way is refused.

What ranks send of a table of n-grams depends on the text: as much as if all n-grams of a
micro-batch were different, which is the most.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any
from unittest import mock

from paddle import Tensor
from paddle.distributed.fleet.utils.tensor_fusion_helper import FusedCommBuffer

from paddle_vl.nn.parameter_table import Tie
from paddle_vl.parallel import collectives
from paddle_vl.parallel.collectives import BUCKET_ELEMENTS
from paddle_vl.parallel.pipeline.runner import PipelineRunner
from paddle_vl.parallel.recorder import Collective
from paddle_vl.parallel.sharding import fleet_optimizer
from paddle_vl.parallel.sharding.buckets import Bucket, Reductions
from paddle_vl.train.build import needed_memory, placed_model
from paddle_vl.train.layout import parallel_degrees
from scale.chain import BACKWARD, FORWARD, PASS, Call, Simulated
from scale.families import TABLE, sized_family
from scale.phantom import PhantomGroup, become_rank
from scale.small_step import SmallStep

# Factors on units and width of the two steps.
STEPS = ((1, 1), (2, 3))
# Bytes to which fleet aligns a parameter's slices, and those of its buffers.
FLEET_ALIGNMENT, FLEET_BUFFER = 256, 256 << 20
# Kind of the calls that gather keys and values.
CONTEXT = "context parallel"
TABLE_ROWS = "tables, at most"
_FUSED = "fused_allreduce_gradients_with_group"
# Parameters of a call, and the elements that one of a size takes over that many ranks, of values
# of so many bytes.
Parameters = Callable[[Collective, PhantomGroup], list[Tensor]]
Padded = Callable[[int, int, int], int]


class Recorder:
    """Names and sizes the calls of a rank.

    Attributes:
        value_bytes: of a parameter of the run.
        calls: with the bytes of the run where they are known, else with those of the small step.
    """

    def __init__(self, config: Any, rank: int):
        self.calls: list[Call] = []
        self.value_bytes = 2 if config.model.compute_dtype == "bfloat16" else 4
        self._reduced_bytes = 2 if config.parallel.reduce_dtype == "bfloat16" else 4
        self._rank = rank
        self._step: SmallStep | None = None
        self._full: dict[int, int] = {}
        # Parameters that have one bucket per layer.
        self._in_units: set[int] = set()
        # What a call carries, and over how many ranks it is sharded if all-reduced over others.
        self._owner: tuple[Parameters, Padded, int | None] | None = None

    def observe(self, call: Collective, group: PhantomGroup) -> None:
        size, pieces, is_sized = call.num_bytes, 1, self._owner is not None
        if self._owner is not None:
            size, pieces = self._of_parameters(call, group, *self._owner)
        kind = self._kind(call, group)
        if (of_table := self._of_table(call)) is not None:
            size, kind, is_sized = of_table, TABLE_ROWS, True
        heads = call.shape[-2] if kind == CONTEXT and len(call.shape) > 2 else 0
        self.calls.append(Call(kind, call.kind, call.ranks, size, pieces, is_sized, heads))

    def _of_table(self, call: Collective) -> int | None:
        """Bytes of the run, of a call with row numbers of a table, or with rows."""
        numbers, width = (0, 0) if self._step is None else self._step.family.looked_up
        if not numbers or self._owner is not None:
            return None
        if call.dtype == "int64":
            return 8 * numbers if call.kind == "alltoall_single" else None
        is_row = call.kind in ("alltoall_single", "all_gather") and call.shape[-1:] == (TABLE,)
        return numbers * width * self.value_bytes if is_row else None

    @contextmanager
    def of(self, step: SmallStep, full: Any) -> Iterator[None]:
        """Record a step anew, with its parameters known.

        Args:
            full: the run's model, without storage.
        """
        self.calls, self._step = [], step
        table, topology = step.model.placement.parameter_table, step.topology
        for parameter, whole in zip(step.model.parameters(), full.parameters(), strict=True):
            self._full[id(parameter)] = size = prod(whole.shape)
            own = None if parameter.stop_gradient else step.store.shard_of(parameter)
            if own is not None and own is not parameter:
                group = topology.sharding_group_of(table[parameter])
                self._full[id(own)] = -(-size // group.nranks)
        units = step.model.decoder_layers
        if topology.encoder is None:
            units = [*step.model.vision_blocks, *units]
        self._in_units = {id(p) for unit in units for p in unit.parameters()}
        with ExitStack() as stack:
            for place, name, parameters_of, padded in (
                (Bucket, "start_all_gather", _of_bucket, _for_shards),
                (Bucket, "start_reduction", _of_bucket, _for_shards),
                (Reductions, "_sum_over_dp", _of_sum, _for_shards),
                (FusedCommBuffer, "_comm_grads", _of_buffer, _for_slices),
                (FusedCommBuffer, "sync_params", _of_buffer, _for_slices),
                (fleet_optimizer, "sum_over_dp", _of_part, _for_slices),
                (collectives, _FUSED, _of_list, _as_is),
            ):
                owned = self._owned(getattr(place, name), parameters_of, padded)
                stack.enter_context(mock.patch.object(place, name, owned))
            # Values of a small model may overflow, and its step then be skipped.
            stack.enter_context(mock.patch("paddle_vl.train.step.isnan", return_value=False))
            for name, time in (("_run_chunk", FORWARD), ("_end_micro_batch", BACKWARD)):
                timed = self._timed(getattr(PipelineRunner, name), time)
                stack.enter_context(mock.patch.object(PipelineRunner, name, timed))
            yield

    def _timed(self, function: Callable, time: float) -> Callable:
        def timed(runner: Any, *args: Any) -> Any:
            part = time / len(runner.own_chunks)
            self.calls.append(Call(PASS, PASS, (self._rank,), 0, pieces=0, time=part))
            return function(runner, *args)

        return timed

    def _owned(self, function: Callable, parameters_of: Callable, padded: Padded) -> Callable:
        """The function, whose calls carry the parameters that its arguments tell."""

        def owned(*args: Any, **kwargs: Any) -> Any:
            outer, (parameters, shards) = self._owner, parameters_of(*args)
            self._owner = parameters, padded, shards
            try:
                return function(*args, **kwargs)
            finally:
                self._owner = outer

        return owned

    def _of_parameters(
        self,
        call: Collective,
        group: PhantomGroup,
        parameters_of: Parameters,
        padded: Padded,
        shards: int | None,
    ) -> tuple[int, int]:
        """Bytes of the run, and the number of its calls."""
        assert self._step is not None
        parameters, ranks = parameters_of(call, group), shards or group.size()
        gathers = call.kind == "all_gather"
        parts = ranks if gathers or shards else 1

        def elements(sizes: Iterable[int], value_bytes: int) -> list[int]:
            return [padded(size, ranks, value_bytes) // parts for size in sizes]

        found = 4 * sum(elements((prod(p.shape) for p in parameters), 4))
        if found != call.num_bytes:
            raise ValueError(
                f"{call.describe()} has {call.num_bytes} bytes, and its {len(parameters)} "
                f"parameters have {found}: this tool does not know how they are padded"
            )
        full = elements((self._full[id(p)] for p in parameters), self.value_bytes)
        degrees = self._step.topology.degrees
        if padded is _as_is and degrees.sharding_degree > 1 and degrees.sharding_stage == 1:
            full = self._mean_slices(parameters, group) or full
        width = self._reduced_bytes if padded is _for_shards and not shards else 4
        width = self.value_bytes if gathers else width
        limit = FLEET_BUFFER // self.value_bytes if padded is _for_slices else BUCKET_ELEMENTS
        in_unit = padded is _for_shards and {id(p) for p in parameters} <= self._in_units
        return width * sum(full), 1 if in_unit else _buckets(full, limit // parts)

    def _mean_slices(self, own: Sequence[Tensor], group: PhantomGroup) -> list[int]:
        """Elements of fleet's slices in an all-reduce over mp or two stages, in the mean over the
        ranks that have them: each rank has slices of other parameters. None of an encoder that
        fleet does not shard."""
        assert self._step is not None
        step, topology = self._step, self._step.topology
        table, slices = step.model.placement.parameter_table, {id(tensor) for tensor in own}
        trained = [p for p in step.model.parameters() if not p.stop_gradient]
        trained = [p for p in trained if not table[p].is_encoder]
        are_slices = not own or any(id(step.store.shard_of(p)) in slices for p in trained)
        sizes = []
        for parameter in trained if are_slices else ():
            spec = table[parameter]
            ranks = topology.sharding_group_of(spec).nranks
            if group is topology.mp_group.process_group:
                takes_part = spec.has_partial_gradient
            else:
                takes_part = spec.tie is not Tie.NONE
            if takes_part:
                size = _for_slices(self._full[id(parameter)], ranks, self.value_bytes)
                sizes.append(size // ranks)
        return sizes

    def _kind(self, call: Collective, group: PhantomGroup) -> str:
        if self._owner is not None:
            return "parameters" if call.kind == "all_gather" else "gradients"
        if call.is_message:
            return "pipeline"
        if self._step is None:
            return "start"
        topology = self._step.topology
        own, encoder = topology.mp_group, topology.encoder
        kinds = [(topology.ep_group, "experts"), (own, "tensor parallel")]
        kinds += [(topology.cp_group, CONTEXT), (topology.cp_mp_group, "tower")]
        if encoder is not None:
            kinds += [(encoder.mp_group, "tower"), (encoder.bridge_group, "bridge")]
            kinds += [(encoder.lane_group, "bridge"), (topology.pp_group, "bridge")]
        of_group = [kind for each, kind in kinds if each and each.process_group is group]
        is_tower = call.shape[-1:] == (self._step.family.tower_width,) and not encoder
        if of_group[:1] in (["tensor parallel"], [CONTEXT]) and is_tower:
            return "tower"
        return of_group[0] if of_group else "all ranks"


def _of_bucket(bucket: Bucket, *args: Any) -> tuple[Parameters, None]:
    def members(call: Collective, group: PhantomGroup) -> list[Tensor]:
        entries = bucket.entries if call.kind == "all_gather" else bucket.trained
        return [entry.parameter for entry in entries if entry.group.process_group is group]

    return members, None


def _of_sum(reductions: Reductions, key: Any) -> tuple[Parameters, int]:
    bucket, group = key
    shards, _ = _of_list([entry.parameter for entry in bucket.by_group[group]])
    return shards, group.nranks


def _of_part(buffer: FusedCommBuffer, group: Any) -> tuple[Parameters, int]:
    return _of_list(buffer.params)[0], buffer._comm_group.nranks


def _of_buffer(buffer: FusedCommBuffer, *args: Any, **kwargs: Any) -> tuple[Parameters, None]:
    return _of_list(buffer.params)


def _of_list(tensors: Sequence[Tensor], *args: Any) -> tuple[Parameters, None]:
    return lambda call, group: list(tensors), None


def _for_shards(size: int, ranks: int, value_bytes: int) -> int:
    return -(-size // ranks) * ranks


def _for_slices(size: int, ranks: int, value_bytes: int) -> int:
    return _for_shards(size, FLEET_ALIGNMENT // value_bytes * ranks, value_bytes)


def _as_is(size: int, ranks: int, value_bytes: int) -> int:
    return size


def _buckets(sizes: Iterable[int], limit: int) -> int:
    """Number of buckets of at most `limit` elements, or one larger parameter."""
    number, filled = 1, 0
    for size in sizes:
        if filled and filled + size > limit:
            number, filled = number + 1, 0
        filled += size
    return number


def simulated(config: Any, rank: int) -> Simulated:
    """Be that rank of the run, in a process of its own.

    Raises:
        ValueError: a run that is not simulated, or a call that does not scale.
    """
    recorder = Recorder(config, rank)
    sizes = become_rank(rank, parallel_degrees(config).num_processes, recorder.observe)
    parallel: dict[str, Any] = {"reduce_dtype": "float32", "dp_comm_overlap": None}
    parallel["cp_gather_overlap"] = None
    parallel |= {"pp_token_rows": None, "pp_visual_rows": None}
    small = config.model_copy(
        update={
            "model": config.model.model_copy(update={"compute_dtype": "float32"}),
            "parallel": config.parallel.model_copy(update=parallel),
        }
    )
    family, whole = sized_family(config), None
    found, groups = [], list[int]()
    for units, width in STEPS:
        sizes.clear()
        recorder.calls = []
        step = SmallStep(small, sized_family(small, width))
        start_calls = len(recorder.calls)
        # Later stages take the counts of targets from the first one, which is not there.
        step.ranks.counts_data = True
        whole = whole or placed_model(config, family, step.engine.layout.placement()).built.model
        with recorder.of(step, whole):
            agreed = step.take(units)
        found.append((step.family, recorder.calls))
        memory = needed_memory(config, step.topology, whole)
        # The default group is made once.
        groups = groups or list(sizes)
    (small_family, calls), (_, grown) = found
    more, by_units = STEPS[1][0], family.units
    growth = {1: Fraction(1), more: by_units}
    for wider, widening in small_family.widenings.items():
        by_width = widening * Fraction(recorder.value_bytes, 4)
        growth |= {wider: by_width, more * wider: by_units * by_width}
    # Queries, keys and values have the run's heads, see `_small` for those of the small model.
    shape, mp, cp = family.shape, config.parallel.mp_degree, config.parallel.cp_degree
    queries, keys = (n // mp for n in (shape.num_attention_heads, shape.num_key_value_heads))
    of_rows = by_units * Fraction(recorder.value_bytes, 4)
    of_heads = {1: of_rows * max(keys, 1)}
    if config.parallel.cp_attention == "ulysses":
        of_heads = {2: of_rows * queries / (2 * cp), 1: of_rows * max(keys, cp) / cp}
    of_run = []
    for call, larger in zip(calls, grown, strict=True):
        ratio = larger.num_bytes / call.num_bytes if call.num_bytes and not call.is_sized else 1
        if ratio not in growth:
            raise ValueError(f"{call} grows {ratio:g} times: this tool cannot scale it")
        factor = of_heads[call.heads] if call.heads else growth[ratio]
        of_run.append(replace(call, num_bytes=round(factor * call.num_bytes)))
    rows = int(by_units * small_family.unit_rows)
    return Simulated(rank, of_run, memory, groups, start_calls, agreed, rows)
