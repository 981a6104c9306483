"""Bytes per rank of parameters, gradients and optimizer state, by formula and of a live run.

With S sharding ranks, w bytes per stored parameter, and `t_u`, `f_u`, `t_r`, `f_r` the trained and
frozen parameters of units and of the rest (the root), `t = t_u + t_r`, `f = f_u + f_r`:

| stage | parameters | float32 copies | moments | gradients at the peak |
| --- | --- | --- | --- | --- |
| 0 | w (t + f) | 4 t, none if w = 4 | 8 t | 4 t |
| 1 | w (t + f) | 4 t / S, none if w = 4 | 8 t / S | 4 t, between steps too |
| 2 | w (t + f) | 4 t / S | 8 t / S | 4 t_u / S + w t_r |
| 3 | w (t_r + f_r) + w f_u / S | 4 t / S | 8 t / S | 4 t_u / S + w t_r |

Stage 0 shards nothing. Stage 1: fleet keeps its gradient buffers between steps and updates slices
of float32 parameters in place. Stage 3: a head with its own weight counts as a unit; the token
table's parameters count as a unit's (sharded; trained ones exist only as float32 copies), its
gradient as the root's. Gradient accumulation adds to the last column w t at stage 0 if w < 4, and
4 t_r / S at stages 2 and 3; with `reduce_once_per_step` it holds 4 t instead until the last
micro-batch. With `reshard_after_forward: false` stage 3 has the parameters of stage 2 during a
step, plus the shards of frozen ones. Activations, collectives in flight and padding are left out;
`passing_bytes` gives the temporary memory of a unit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paddle import Tensor, nn

from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.parallel.sharding import Sharding, ShardingOptions

_FLOAT32_BYTES = 4
_PLAIN = ShardingOptions()


@dataclass(frozen=True)
class Elements:
    """Numbers of parameters."""

    trained: int = 0
    frozen: int = 0

    @property
    def total(self) -> int:
        return self.trained + self.frozen

    @classmethod
    def of(cls, parameters: Iterable[Tensor]) -> "Elements":
        parameters = list(parameters)
        trained = sum(p.size for p in parameters if not p.stop_gradient)
        return cls(trained, sum(p.size for p in parameters) - trained)


@dataclass(frozen=True)
class ModelElements:
    """Parameter counts of a model, or of an mp rank's shard of it.

    Attributes:
        units: sum over all units.
        root: parameters outside units.
        largest_unit: the unit with the most parameters.
        largest_in_root: size of the largest trained tensor of the root, such as a token table.
        item_bytes: bytes per stored parameter, 2 or 4.
        table: the token table; it belongs to the root and is sharded at stage 3.
        head: a head with its own weight; it belongs to the root and is a unit at stage 3.
    """

    units: Elements
    root: Elements
    largest_unit: Elements
    largest_in_root: int
    item_bytes: int
    table: Elements = Elements()
    head: Elements = Elements()

    @classmethod
    def of(
        cls,
        parameters: Iterable[Tensor],
        units: Sequence[nn.Layer],
        item_bytes: int,
        tables: Sequence[nn.Layer] = (),
    ) -> "ModelElements":
        """Count the parameters of a model, materialized or not.

        Args:
            tables: the token embedding, then the head, which may have the same weight.
        """
        parameters = list(parameters)
        owned = {id(p) for unit in units for p in unit.parameters()}
        largest = max(
            (p.size for p in parameters if id(p) not in owned and not p.stop_gradient), default=0
        )
        per_unit = [Elements.of(unit.parameters()) for unit in units]
        full = Elements.of(parameters)
        in_units = Elements(sum(u.trained for u in per_unit), sum(u.frozen for u in per_unit))
        root = Elements(full.trained - in_units.trained, full.frozen - in_units.frozen)
        largest_unit = max(per_unit, key=lambda unit: unit.total, default=Elements())
        table, *others = [layer.weight for layer in tables] or [None]
        heads = [weight for weight in others if weight is not table]
        return cls(
            in_units,
            root,
            largest_unit,
            largest,
            item_bytes,
            Elements() if table is None else Elements.of([table]),
            Elements.of(heads),
        )


@dataclass(frozen=True)
class HeldBytes:
    """Bytes per rank.

    Attributes:
        parameters: parameters of the layers, and shards of frozen parameters.
        masters: float32 master weights, or this rank's shards of them.
        gradients: gradients of parameters and masters, and their sums over micro-batches.
        moments: both moments of Adam.
    """

    parameters: float
    masters: float
    gradients: float
    moments: float

    @property
    def total(self) -> float:
        return sum(getattr(self, item.name) for item in fields(self))


def between_steps(model: ModelElements, stage: int, num_ranks: int) -> HeldBytes:
    """Memory between two steps.

    Args:
        stage: sharding stage; 0 shards nothing at any number of ranks.
        num_ranks: size of the sharding group.
    """
    width, ranks = model.item_bytes, num_ranks if stage else 1
    trained = model.units.trained + model.root.trained
    if stage < 3:
        parameters = width * (model.units.total + model.root.total)
    else:
        parameters = width * (model.root.total - model.table.total - model.head.total)
        parameters += _frozen_shards(model, ranks)
    needs_masters = stage > 1 or width < _FLOAT32_BYTES
    masters = _FLOAT32_BYTES * trained / ranks if needs_masters else 0
    gradients = _FLOAT32_BYTES * trained if stage == 1 else 0
    return HeldBytes(parameters, masters, gradients, 2 * _FLOAT32_BYTES * trained / ranks)


def at_peak(
    model: ModelElements,
    stage: int,
    num_ranks: int,
    num_micro_batches: int = 1,
    options: ShardingOptions = _PLAIN,
) -> HeldBytes:
    """Memory when most gradients exist: after the last backward pass, or right before it if full
    gradients are accumulated until then.

    Arguments as for `between_steps`.
    """
    width, held = model.item_bytes, between_steps(model, stage, num_ranks)
    has_sums, parameters = num_micro_batches > 1, held.parameters
    trained = model.units.trained + model.root.trained
    if stage < 2:
        gradients = _FLOAT32_BYTES * trained
        if has_sums and stage == 0 and width < _FLOAT32_BYTES:
            gradients += width * trained
    else:
        head = model.head.trained if stage == 3 else 0
        root, sharded = model.root.trained - head, model.units.trained + head
        gradients = _FLOAT32_BYTES * sharded / num_ranks + width * root
        if has_sums and options.reduce_once_per_step:
            gradients += _FLOAT32_BYTES * root if width < _FLOAT32_BYTES else 0
            gradients = max(gradients, _FLOAT32_BYTES * trained)
        elif has_sums:
            gradients += _FLOAT32_BYTES * root / num_ranks
    if stage == 3 and not options.reshard_after_forward:
        parameters = width * (model.units.total + model.root.total)
        parameters += _frozen_shards(model, num_ranks)
    return HeldBytes(parameters, held.masters, gradients, held.moments)


def passing_bytes(model: ModelElements, stage: int, options: ShardingOptions = _PLAIN) -> int:
    """Peak of the temporary memory beyond `at_peak`.

    For a unit: its full gradients, plus either their packed copy for the reduce-scatter or the
    gradients of the previous unit in flight; at stage 3 also its parameters and those of the next
    unit, or those of a table alone. For the root's largest tensor: its gradient in the dtype of the
    reduction.
    """
    width, unit = model.item_bytes, model.largest_unit
    sent = 2 if options.reduce_dtype == "bfloat16" else _FLOAT32_BYTES
    if stage < 2:
        return 0
    head = model.head if stage == 3 else Elements()
    packing = 2 * sent * unit.trained
    computing = width * unit.trained + sent * max(unit.trained, head.trained)
    table = 0 if sent == width else sent * model.largest_in_root
    if options.reduce_once_per_step and width < _FLOAT32_BYTES:
        computing = max(computing, (width + _FLOAT32_BYTES) * unit.trained)
    if stage == 2:
        return max(packing, computing, table)
    if not options.reshard_after_forward:
        return max(packing, computing, table, width * unit.total)
    tables = width * max(model.table.total, head.total + head.trained)
    return max(packing + width * unit.total, computing + 2 * width * unit.total, table, tables)


def _frozen_shards(model: ModelElements, num_ranks: int) -> float:
    """Shards of frozen parameters at stage 3; the shard of a trained one is its float32 copy."""
    frozen = model.units.frozen + model.table.frozen + model.head.frozen
    return model.item_bytes * frozen / num_ranks


def counted_bytes(
    parameters: Iterable[Tensor], trained: Any, states: Iterable[Tensor]
) -> HeldBytes:
    """Memory of a live run, counted from its existing tensors.

    Args:
        parameters: parameters of the model on this rank.
        trained: `Sharding` or `MasterWeights` of the parameters.
        states: moments of the optimizer.
    """
    parameters = list(parameters)
    copies = copies_of(trained)
    frozen = [copy for copy in copies if copy.stop_gradient]
    masters = [copy for copy in copies if not copy.stop_gradient]
    gradients = [tensor.grad for tensor in [*parameters, *masters] if tensor.grad is not None]
    return HeldBytes(
        _bytes([p for p in parameters if p._is_initialized()] + frozen),
        _bytes(masters),
        _bytes([*gradients, *gradient_sums_of(trained)]),
        _bytes(states),
    )


def copies_of(store: Any) -> list[Tensor]:
    """Tensors that a store keeps besides the parameters: master weights or shards."""
    if isinstance(store, Sharding):
        return [entry.shard for entry in store._entries.values()]
    return list(store._masters.values())


def gradient_sums_of(store: Any) -> list[Tensor]:
    """Gradients that a store keeps besides the `grad` of parameters and copies."""
    if isinstance(store, Sharding):
        wide = [total for bucket in store._buckets for total in bucket._wide._sums.values()]
        return [*wide, *store._reductions._sums.values()]
    if isinstance(store, MasterWeights):
        return list(store._gradients._sums.values())
    return [buffer.grad_storage for buffer in store._buffers] if store.optimizer else []


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.size * tensor.element_size() for tensor in tensors)
