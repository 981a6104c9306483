"""AdamW over named parameters: gradient norm, clipping and update.

On a GPU the updated tensors are parts of flat buckets, so that a step launches few kernels; on a
CPU, where launches cost little and the gradients' copies into buckets cost something, they are only
if the buckets are summed over dp in the backward pass.
Fleet's sharding stage 1 has buffers of its own.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, _C_ops
from paddle.base.framework import default_main_program

from paddle_vl.config.schema import TrainConfig
from paddle_vl.nn.flat_buckets import POWERS, STATES, FlatBucket, grouped
from paddle_vl.nn.linear import gradient_of, names_by_parameter
from paddle_vl.nn.master_weights import MasterWeights, ParameterStore, exchange_values
from paddle_vl.nn.parameter_table import ParameterTable, ParamSpec, Saved
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank
from paddle_vl.parallel.sharding import FleetSharding
from paddle_vl.parallel.summed_weights import SummedWeights
from paddle_vl.train.freeze import NamedParameters
from paddle_vl.train.optimizer_state import OptimizerState

logger = logging.getLogger(__name__)


class AdamW(paddle.optimizer.AdamW):
    """AdamW whose step updates float32 master weights in place of half-precision parameters.

    Paddle's own `multi_precision` is not used: its bfloat16 kernel exists on GPUs only. The class
    must be called AdamW, since Paddle fuses optimizer state by class name.

    Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.

    Attributes:
        left_out: names of updated tensors that are left as they are.
    """

    left_out: Collection[str] = ()

    def use_masters(self, masters: Mapping[str, Tensor]) -> None:
        """Update these float32 copies (by parameter name) and round them into the parameters."""
        self._master_weights.update(masters)

    @paddle.no_grad()
    def update(self, values: Tensor, grad: Tensor, half: Tensor | None = None) -> None:
        """Update a tensor that is none of the optimizer's parameters, as part of a flat bucket.

        On a GPU it is one kernel, which moves 28 bytes for each value, and 2 more with `half`.

        Args:
            values: float32, with `name` and `optimize_attr` as of a parameter, and `states`, its
                state tensors by name.
            half: a half-precision tensor that gets the rounded values.
        """
        if values.name in self.left_out:
            return
        self._create_global_learning_rate()
        moment1, moment2, power1, power2 = (
            self._get_accumulator_master(name, values) for name in STATES
        )
        in_one = half is not None and _updates_and_rounds(half)
        decays: Any = self._apply_decay_param_fun
        # Any: Paddle types what may be None as tensors.
        kernel: Any = _C_ops.adamw_
        kernel(
            half if in_one else values, grad, self._create_param_lr((values, grad)),
            moment1, moment2, None, power1, power2, values if in_one else None, None,
            self._beta1, self._beta2, self._epsilon, 1.0, self._weight_decay,
            decays(values.name), False, 1000, in_one, False, False,
        )  # fmt: skip
        if half is not None and not in_one:
            paddle.assign(values.astype(half.dtype), half)

    def _get_accumulator_master(self, name, param):
        states = getattr(param, "states", None)
        return super()._get_accumulator_master(name, param) if states is None else states[name]

    def _create_accumulators(self, block, parameters):
        masters = self._master_weights
        super()._create_accumulators(block, [masters.get(p.name, p) for p in parameters])

    def _append_optimize_op(self, block, param_and_grad):
        parameter, grad = param_and_grad
        master = self._master_weights.get(parameter.name)
        if master is None:
            self.update(parameter, grad)
        else:
            self.update(master, grad, parameter)


def _updates_and_rounds(half: Tensor) -> bool:
    """Whether Paddle has AdamW with master weights for this tensor: on GPUs only."""
    return half.place.is_gpu_place()


class Optimizer(OptimizerState):
    """AdamW with global-norm clipping.

    Attributes:
        store: has the tensors that are updated in place of the parameters.
        tensors_with_specs: the updated tensors of this rank, or the buckets that these are in, with
            the specs of the parameters.

    Args:
        parameters: HF names and parameters to train, a fused one once for each of its linears.
        train: the optimizer's settings.
        decayed: names with weight decay, see `decayed_names`.
        store: master weights or shards; None updates the parameters themselves.
        parameter_table: of the model; None if all parameters are replicated.
        trained_names: HF names that the run trains; None if this rank has all of them.
        rate_factors: factors on the learning rate by HF name; 1 by default.
        updates: False makes neither moments nor norms nor updates, to profile without them.
        frozen_steps: see `begin_step`, by HF name; 0 by default.

    Raises:
        ValueError: linears of a fused parameter differ in being trained, in learning rate, in
            weight decay or in frozen steps.
    """

    def __init__(
        self,
        parameters: NamedParameters,
        train: TrainConfig,
        decayed: set[str],
        store: ParameterStore | None = None,
        parameter_table: ParameterTable | None = None,
        trained_names: Iterable[str] | None = None,
        rate_factors: Mapping[str, float] | None = None,
        updates: bool = True,
        frozen_steps: Mapping[str, int] | None = None,
    ):
        self.parameters, self._updates = parameters, updates
        self.trained_names = set(trained_names or (name for name, _ in parameters))
        self.store: ParameterStore = MasterWeights([]) if store is None else store
        if parameter_table is None:
            parameter_table = ParameterTable()
            parameter_table.add(parameter for _, parameter in parameters)
        self._table = parameter_table
        self.max_grad_norm = train.max_grad_norm
        # Each parameter once, and its HF names.
        self._named = names_by_parameter(parameters)
        # Of each trained name, alike on all ranks; and of those that a backward pass has reached.
        self._numbers = {name: number for number, name in enumerate(sorted(self.trained_names))}
        self._reached: set[int] = set()
        for parameter, names in self._named:
            if not parameter.stop_gradient:
                # Sums over ranks give the others zeros, and fleet's buffers always have a gradient.
                numbers = [self._numbers[name] for name in names]
                parameter._register_backward_hook(partial(self._reached.update, numbers))
        factors = rate_factors or {}
        # Any: only fleet's distribute leaves a rank without a share.
        updated: list[Any] = [self.store.shard_of(p) for p, _ in self._named]
        # Parameters that are frozen at first, with the number of steps.
        self._late: list[tuple[Tensor, int]] = []
        of_names = frozen_steps or {}
        for parameter, names in self._named:
            num_steps = _of_all(names, lambda name: of_names.get(name, 0), "frozen steps")
            if num_steps:
                self._late.append((parameter, num_steps))
        for (_, names), tensor in zip(self._named, updated, strict=True):
            # Set on the parameter: AdamW's lr_ratio works on GPUs only.
            factor = _of_all(names, lambda name: factors.get(name, 1.0), "learning rate")
            tensor.optimize_attr = {"learning_rate": factor}
        with_decay: set[str] = set()
        self._adamw = AdamW(
            learning_rate=train.learning_rate,
            beta1=train.adam_beta1,
            beta2=train.adam_beta2,
            epsilon=train.adam_epsilon,
            parameters=updated,
            weight_decay=train.weight_decay,
            apply_decay_param_fun=with_decay.__contains__,
        )
        # At stage 1 fleet takes full parameters and replaces them by slices.
        self._fleet = self.store if isinstance(self.store, FleetSharding) else None
        if self._fleet is not None:
            self._fleet.distribute(self._adamw)
        self.tensors_with_specs: list[tuple[Tensor, ParamSpec]] = []
        for parameter, names in self._named:
            tensor = self.store.shard_of(parameter)
            has_decay = _of_all(names, decayed.__contains__, "weight decay")
            # None where other ranks have all of the parameter.
            if tensor is not None:
                self.tensors_with_specs.append((tensor, self._table[parameter]))
                if has_decay:
                    with_decay.add(tensor.name)
        self.tensors = [tensor for tensor, _ in self.tensors_with_specs]
        self._with_decay, self._buckets = with_decay, list[FlatBucket]()
        # Bucket of an updated tensor and number in it, by identity.
        self._place: dict[int, tuple[FlatBucket, int]] = {}
        self._averages = {} if updates and train.ema is not None else None
        if not updates:
            return
        overlaps = isinstance(self.store, SummedWeights) and self.store.overlaps
        if overlaps or (self._fleet is None and not paddle.get_device().startswith("cpu")):
            self.use_buckets()
            return
        # Paddle makes state at the first step; a checkpoint is loaded before that.
        block = default_main_program().global_block()
        self._adamw._create_accumulators(block, self.tensors)
        if self._averages is not None:
            self._averages |= {id(tensor): tensor.detach().clone() for tensor in self.tensors}

    @paddle.no_grad()
    def use_buckets(self) -> None:
        """Move the updated tensors into flat buckets, before the first step.

        Raises:
            ValueError: with fleet's sharding.
        """
        if self._fleet is not None:
            raise ValueError("sharding stage 1 has fleet's flat buffers: it takes no buckets")
        has_masters, entries = isinstance(self.store, MasterWeights), []
        parameters = [parameter for parameter, _ in self._named]
        late = {id(parameter): num_steps for parameter, num_steps in self._late}
        for parameter in parameters:
            tensor, spec = self.store.shard_of(parameter), self._table[parameter]
            assert tensor is not None, "only fleet's distribute leaves a rank without a share"
            axis = None if spec.split_axis is None else 0
            # What the tensors of a bucket share: frozen steps, factor of the learning rate, decay,
            # whether they are masters of half-precision parameters, and how they are reduced.
            key = (
                late.get(id(parameter), 0),
                tensor.optimize_attr["learning_rate"],
                tensor.name in self._with_decay,
                has_masters and parameter.dtype != paddle.float32,
                replace(spec, split_axis=axis, blocks=(), saved=Saved.HERE),
            )
            entries.append((tensor, key))
        betas: Any = (self._adamw._beta1, self._adamw._beta2)
        powers: dict[str, float] = dict(zip(POWERS, betas, strict=True))
        self.tensors_with_specs = []
        most = self.store.bucket_elements if isinstance(self.store, SummedWeights) else None
        for key, numbers in grouped(entries, most):
            _, factor, has_decay, is_half, spec = key
            tensors = [entries[number][0] for number in numbers]
            halves = [parameters[number] for number in numbers] if is_half else []
            averages = self._averages is not None
            bucket = FlatBucket(tensors, halves, {"learning_rate": factor}, powers, averages)
            self._place |= {id(tensor): (bucket, n) for n, tensor in enumerate(tensors)}
            self._buckets.append(bucket)
            self.tensors_with_specs.append((bucket.values, spec))
            if has_decay:
                self._with_decay.add(bucket.values.name)
        # State that Paddle has made before.
        self._adamw._accumulators.clear()
        self.tensors = [tensor for tensor, _ in self.tensors_with_specs]
        self.store.use_buckets(self._buckets)

    def begin_step(self, step: int) -> None:
        """Freeze what is frozen in this step, counted from 0, and train what no longer is.

        A frozen parameter is not updated, nor does its state change. Stages 2 and 3 of sharding
        still reduce zeros as its gradient.
        """
        for parameter, num_steps in self._late:
            shard = self.store.shard_of(parameter)
            bucket, _ = self._place.get(id(shard), (None, 0))
            for tensor in (parameter, shard, None if bucket is None else bucket.values):
                if tensor is not None:
                    tensor.stop_gradient = step < num_steps
        if num_begun := sum(num_steps == step for _, num_steps in self._late):
            logger.info("after %d steps: training %d more tensors", step, num_begun)
        self._late = [entry for entry in self._late if step < entry[1]]

    def collect_gradients(self) -> None:
        """Move gradients into the buckets, after the last backward pass of a step."""
        for bucket in self._buckets:
            bucket.take_all()

    @paddle.no_grad()
    def squared_norm(self, ranks: SingleRank = ONE_RANK) -> Tensor:
        """Float32 sum of squares of this rank's gradients before clipping.

        In the sum over all ranks each element of a parameter counts once, sharded or replicated.
        """
        self.collect_gradients()
        total = paddle.zeros([])
        for tensor, spec in self.tensors_with_specs if self._updates else ():
            grad = gradient_of(tensor)
            if grad is not None and ranks.counts_here(spec):
                total = total + _C_ops.squared_l2_norm(grad.astype("float32")).reshape([])
        return total

    def reached(self) -> np.ndarray:
        """`[n]` float32, n trained names of the run: 1 for those whose parameter has got a gradient
        in a backward pass of this step, on this rank."""
        found = np.zeros([len(self._numbers)], dtype=np.float32)
        found[list(self._reached)] = 1.0
        return found

    def update(self, learning_rate: float, norm: float, reached: np.ndarray | None = None) -> None:
        """Clip gradients of a global `norm` to max_grad_norm, and update.

        Args:
            learning_rate: multiplied by a parameter's own factor.
            reached: sum of `reached()` over all ranks. A parameter that none has reached is not
                updated, nor does its state change, as on one device. None for one rank.
        """
        if self._updates:
            self._leave_out_all_but(reached)
            self.clip_gradients(norm)
            self.step(learning_rate)

    @paddle.no_grad()
    def clip_gradients(self, norm: float) -> None:
        """Scale gradients of a global `norm` above max_grad_norm down to it.

        Source: torch.nn.utils.clip_grad_norm_, whose factor is max_norm / (norm + 1e-6).
        """
        self.collect_gradients()
        factor = self.max_grad_norm / (norm + 1e-6)
        if self.max_grad_norm and factor < 1.0:
            for grad in self._gradients():
                grad.scale_(factor)

    def step(self, learning_rate: float) -> None:
        """Update every parameter with a gradient, at the rate times the parameter's factor."""
        # Paddle's optimizer fails without parameters, as on a pipeline stage with nothing to train.
        if not self.tensors:
            return
        self._adamw.set_lr(learning_rate)
        if self._fleet is not None:
            self._fleet.step()
            return
        if self._buckets:
            self.collect_gradients()
            for bucket in self._buckets:
                if not bucket.values.stop_gradient:
                    bucket.update(self._adamw)
        else:
            self._adamw.step()
        # Buckets of master weights have rounded theirs.
        if self.store.stage or not self._buckets:
            self.store.all_gather_parameters()

    @paddle.no_grad()
    def update_average(self, decay: float, is_good: Tensor) -> None:
        """After a step: average = decay * average + (1 - decay) * weights, in float32.

        Args:
            is_good: of the step; with False the average stays as it is. Not read by the host.
        """
        rate = is_good.astype("float32") * (1.0 - decay)
        for tensor, average in self._averaged():
            average.add_((tensor - average) * rate)

    def swap_average(self) -> None:
        """Exchange the weights with their average, see `exchange_values`."""
        if self._averages is None:
            return
        if self._fleet is not None:
            self._fleet.finish_gathers()
        exchange_values(self._averaged(), self.store)

    def _averaged(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The updated tensors, or the buckets that these are in, with their average."""
        if (averages := self._averages) is None:
            return
        for tensor in self.tensors:
            bucket = getattr(tensor, "bucket", None)
            yield tensor, averages[id(tensor)] if bucket is None else bucket.average

    def clear_gradients(self) -> None:
        """Drop the gradients; Paddle's default would fill them with zeros."""
        if self._fleet is not None:
            self._fleet.clear()
        elif self.tensors:
            self._adamw.clear_grad(set_to_zero=False)
        for bucket in self._buckets:
            bucket.clear()
        self._reached.clear()

    def _leave_out_all_but(self, reached: np.ndarray | None) -> None:
        self._adamw.left_out = left_out = set[str]()
        if reached is None or reached.all():
            return
        for parameter, names in self._named:
            tensor = self.store.shard_of(parameter)
            if tensor is None or reached[self._numbers[names[0]]]:
                continue
            if id(tensor) in self._place:
                bucket, number = self._place[id(tensor)]
                bucket.drop(number)
            else:
                left_out.add(tensor.name)

    def _gradients(self) -> list[Tensor]:
        grads = map(gradient_of, self.tensors)
        return [grad for grad in grads if grad is not None]


def _of_all(names: list[str], value_of: Callable[[str], Any], what: str) -> Any:
    """The value that all names of a parameter share.

    Raises:
        ValueError: the values differ.
    """
    values = {name: value_of(name) for name in names}
    if len(set(values.values())) > 1:
        raise ValueError(
            f"{', '.join(names)} are trained as one weight but have different settings of their "
            f"{what}: {values}; separate the layer's projections first"
        )
    return values[names[0]]
