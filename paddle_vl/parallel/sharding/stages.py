"""Stages 2 and 3: which buckets there are, and when they are reduced, gathered and freed."""

from collections import Counter
from collections.abc import Container, Iterable, Sequence

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.parallel.collectives import all_gathered
from paddle_vl.parallel.layer_wrappers import Level, wrap_layer
from paddle_vl.parallel.sharding.buckets import Bucket, Part, buckets_of, check_whole, from_rows
from paddle_vl.parallel.sharding.options import ShardingOptions
from paddle_vl.parallel.sharding.pending import Reductions
from paddle_vl.parallel.sharding.storage import Storage
from paddle_vl.parallel.sharding.unit import TableForward, UnitForward, chained


class Sharding:
    """Parameters of one model, divided over a group whose ranks take different samples.

    A step: `begin_step`; for each micro-batch forward, backward, `end_micro_batch`; then
    `end_backward`, an optimizer's step on the shards, `all_gather_parameters`, and the shards'
    gradients are cleared with `set_to_zero=False`. Gradients are summed over ranks and
    micro-batches, not averaged.

    From `end_micro_batch` on these methods are collective, and so are backward passes of units, and
    at stage 3 their forward passes: every rank runs the same units in the same order. Which
    parameters get a gradient may differ; one without takes part with zeros.

    Args:
        parameters: the model's on this rank, trained and frozen, each once, in the same order on
            the group's ranks. Those that are `stop_gradient` now count as frozen. Each is divided
            before the next is asked for, and at stage 3 without storage then if it is a unit's or a
            table: what comes out of `Materializable.materialize` needs no more than this rank's
            share at any time.
        group: a `paddle.distributed` group of at least two ranks.
        stage: 2 or 3, see the package.
        chains: layers that run one behind the other whenever the first of them does. A layer is a
            unit: it takes its tensors as positional arguments and returns tensors, and its
            parameters are used nowhere else. Their `forward` is wrapped, around recomputation if
            there is any, see `paddle_vl.parallel.layer_wrappers`. At stage 3 without recomputation,
            a weight of which a graph saved a view (a slice, a transpose) keeps its storage until
            the backward pass.
        tables: token embeddings and heads, which stage 3 divides too. Their `weight` is used by
            them alone, and two of them may have the same.

    Raises:
        ValueError: another stage or group; a parameter listed twice, or in two units, or in a unit
            and not in the list.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        group,
        stage: int,
        chains: Sequence[Sequence[nn.Layer]] = (),
        tables: Sequence[nn.Layer] = (),
        options: ShardingOptions | None = None,
    ):
        if stage not in (2, 3):
            raise ValueError(
                f"sharding stage is {stage!r}; it must be 2 or 3, and stage 1 is FleetSharding"
            )
        if group.nranks < 2:
            raise ValueError("a sharding group of one rank has nothing to divide; use no Sharding")
        self.group, self.stage, self.options = group, stage, options or ShardingOptions()
        self._parts: dict[int, Part] = {}
        self._reductions = Reductions(group, self.options.reduce_dtype)
        self._storage = Storage() if stage == 3 else None
        # Micro-batches of this step that are still to come, if that is known.
        self._num_left: int | None = None
        self._unreduced: dict[Bucket, None] = {}
        # Tables that this micro-batch's backward pass is done with.
        self._done_tables: set[Bucket] = set()
        tables = tables if stage == 3 else ()
        layers = [layer for chain in chains for layer in chain]
        owned = [list(layer.parameters()) for layer in layers]
        owned += [[weight] for weight in {id(t.weight): t.weight for t in tables}.values()]
        owner_of = {id(p): number for number, ps in enumerate(owned) for p in ps}
        left, trained = self._divide(parameters, owner_of)
        for number, of_unit in enumerate(owned):
            for parameter in of_unit:
                if id(parameter) not in left:
                    raise ValueError(
                        f"{parameter.name} {list(parameter.shape)} of sharding unit {number} is in "
                        "another unit too, or not among the parameters to shard"
                    )
                left.remove(id(parameter))
        root = [self._parts[id(p)] for p in trained if id(p) not in owner_of]
        self._root = list(buckets_of(root, group, self._reductions))
        self._forwards: list[UnitForward] = []
        self._units = [bucket for chain in chains for bucket in self._add_chain(chain)]
        self._tables = self._add_tables(tables)

    def shard_of(self, parameter: Tensor) -> Tensor:
        """`[n]`, this rank's part: the optimizer's parameter for a trained one.

        A frozen parameter has one where stage 3 divides it only. What is written here reaches the
        whole parameter with `all_gather_parameters`, or when it is gathered next.

        Raises:
            ValueError: the parameter is not divided.
        """
        part = self._parts.get(id(parameter))
        if part is None:
            raise ValueError(f"{parameter.name} is not divided: frozen, or not of this model")
        return part.shard

    def copies(self) -> list[Tensor]:
        """The shards."""
        return [part.shard for part in self._parts.values()]

    def gradient_sums(self) -> list[Tensor]:
        """What is held of gradients beside those of parameters and shards."""
        wide = [total for bucket in self._buckets for total in bucket.gradient_sums()]
        return [*wide, *self._reductions.held()]

    def begin_step(self, num_micro_batches: int) -> None:
        """Tell how many micro-batches the step has. Without it, what is reduced once per step is
        reduced behind the last backward pass, and not in it."""
        self._num_left = num_micro_batches

    def end_micro_batch(self) -> None:
        """Behind each micro-batch's backward pass: reduce what no unit has reduced.

        Raises:
            RuntimeError: a unit's parameter got a gradient outside of the unit.
        """
        if not self.options.reduce_once_per_step:
            self._check_units()
        left = [bucket for bucket in self._tables if bucket not in self._done_tables]
        for bucket in (*self._root, *left):
            self._behind_backward(bucket)
        self._done_tables.clear()
        if self._storage is not None:
            if self.options.reshard_after_forward:
                self._storage.free_all()
            else:
                self._storage.drop_ahead()
        if self._num_left is not None:
            self._num_left -= 1

    def end_backward(self) -> None:
        """Behind the last micro-batch: each shard gets its gradient, and no whole one is left."""
        for bucket in self._unreduced:
            bucket.start_reduction()
        self._check_units()
        for bucket in self._buckets:
            bucket.hand_out_gradients()
        self._unreduced.clear()
        self._num_left = None
        for unit in self._forwards:
            # Of graphs that nobody ran a backward pass through.
            unit.num_open = 0
        if self._storage is not None:
            self._storage.free_all()

    def all_gather_parameters(self) -> None:
        """Behind the optimizer's step: what is whole between steps gets the shards' values."""
        if self._storage is not None:
            # What was gathered before.
            self._storage.free_all()
        for bucket in self._root if self.stage == 3 else self._buckets:
            bucket.fill_parameters()

    def gathered_value(self, parameter: Tensor, value: Tensor | None = None) -> Tensor:
        """The parameter's whole value on this rank, in its shape; every rank calls it.

        A parameter that is whole between steps is returned as it is.

        Args:
            value: `[n]`, something else laid out like the parameter's shard, such as a moment.
        """
        if value is None and parameter._is_initialized():
            return parameter.detach()
        shard = value
        if value is None:
            shard = self.shard_of(parameter).detach().astype(parameter.dtype)
        with paddle.no_grad():
            return from_rows(all_gathered(shard, self.group), parameter)

    def own_shard(self, parameter: Tensor, whole: np.ndarray) -> np.ndarray:
        """`[n]`, this rank's part of an array in the parameter's shape, zeros where it ends.

        Raises:
            ValueError: the shapes differ.
        """
        check_whole(whole, parameter)
        length = -(-whole.size // self.group.nranks)
        own = np.zeros(length, whole.dtype)
        values = whole.reshape(-1)[self.group.rank * length :][:length]
        own[: values.size] = values
        return own

    @property
    def _buckets(self) -> list[Bucket]:
        return [*self._root, *self._tables, *self._units]

    def _behind_backward(self, bucket: Bucket) -> None:
        """What a backward pass left in a bucket is reduced, or kept for the step's last one."""
        if self.options.reduce_once_per_step and self._num_left != 1:
            bucket.keep_gradients()
            # Every rank ran the same backward passes, so these are the same everywhere.
            self._unreduced[bucket] = None
        else:
            bucket.start_reduction()
            self._unreduced.pop(bucket, None)

    def _check_units(self) -> None:
        for part in (part for unit in self._units for part in unit.trained):
            if part.parameter.grad is not None:
                raise RuntimeError(
                    f"{part.parameter.name} {list(part.parameter.shape)} belongs to a sharding "
                    "unit and got a gradient outside of it; leave the layer out of the units"
                )

    def _divide(
        self, parameters: Iterable[Tensor], owner_of: Container[int]
    ) -> tuple[set[int], list[Tensor]]:
        """Take this rank's part of each parameter as it comes.

        Returns:
            Identities of all, and the trained ones.
        """
        seen: set[int] = set()
        trained: list[Tensor] = []
        num_twice = 0
        for parameter in parameters:
            if id(parameter) in seen:
                num_twice += 1
                continue
            seen.add(id(parameter))
            loses_storage = self.stage == 3 and id(parameter) in owner_of
            if not parameter.stop_gradient:
                trained.append(parameter)
            elif not loses_storage:
                continue
            self._parts[id(parameter)] = Part.of(parameter, self.group)
            if loses_storage:
                parameter._clear_data()
        if num_twice:
            raise ValueError(f"{num_twice} parameters to shard are listed twice")
        return seen, trained

    def _bucket(self, parameters: Iterable[Tensor]) -> Bucket | None:
        parts = [self._parts[id(p)] for p in parameters if id(p) in self._parts]
        return Bucket(parts, self.group, self._reductions) if parts else None

    def _add_chain(self, layers: Sequence[nn.Layer]) -> list[Bucket]:
        keeps, forwards = not self.options.reshard_after_forward, []
        for layer in layers:
            bucket = self._bucket(layer.parameters())
            if bucket is not None:
                unit = UnitForward(bucket, self._storage, keeps, self._behind_backward)
                wrap_layer(layer, Level.SHARDING, unit)
                forwards.append(unit)
        chained(forwards)
        self._forwards += forwards
        return [unit.bucket for unit in forwards]

    def _add_tables(self, layers: Sequence[nn.Layer]) -> list[Bucket]:
        """A look-up's backward pass may come at different places on different ranks: its gradient
        waits for the end of the micro-batch. That of a head with a weight of its own does not."""
        keeps, buckets = not self.options.reshard_after_forward, {}
        users = Counter(id(layer.weight) for layer in layers)
        for layer in layers:
            key = id(layer.weight)
            if key not in buckets:
                buckets[key] = self._bucket([layer.weight])
            behind = self._behind_head if users[key] == 1 else _leave
            table = TableForward(buckets[key], self._storage, keeps, behind)
            wrap_layer(layer, Level.SHARDING, table)
            self._forwards.append(table)
        return list(buckets.values())

    def _behind_head(self, bucket: Bucket) -> None:
        self._behind_backward(bucket)
        self._done_tables.add(bucket)


def _leave(bucket: Bucket) -> None:
    """Other gradients of it are still to come."""
