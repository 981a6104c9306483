"""AdamW over named parameters: gradient norm, clipping, and a state that is saved by HF name.

Paddle names optimizer state after counters that differ from process to process, so the state is
read and written here through the parameter it belongs to.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.base import framework

from paddle_vl.checkpoint.safetensors_io import TensorToWrite
from paddle_vl.checkpoint.shared_array import SharedArray
from paddle_vl.config.patterns import PARTS
from paddle_vl.config.schema import TrainConfig
from paddle_vl.nn.adamw import STATES, AdamW
from paddle_vl.nn.fused import fused_columns, names_by_parameter, whole_slices
from paddle_vl.nn.master_weights import gradient_of
from paddle_vl.nn.placement import SingleDevicePlacement
from paddle_vl.train.freeze import NamedParameters, matching_names
from paddle_vl.train.processes import ONE_PROCESS, SingleProcess

_MASTER = "master_weight"


class Optimizer:
    """AdamW with global-norm clipping.

    Attributes:
        masks_updates: an update that does not count is masked on the device, whose flag is not read
            on the host; on a CPU it is read.

    Args:
        parameters: HF names and parameters to train, a fused one once for each of its linears.
            Updates go to what the placement says is trained for them, all of it float32.
        train: the optimizer's settings.
        decayed: names with weight decay, see `decayed_names`.
        placement: says what this rank holds of each parameter.
        trained_names: HF names that the whole run trains, where this rank has some of them only.
        rate_factors: by HF name the factor on the learning rate, 1 for those left out.

    Raises:
        ValueError: linears of a fused parameter that are not all trained, with the same rate and
            decay.
    """

    def __init__(
        self,
        parameters: NamedParameters,
        train: TrainConfig,
        decayed: set[str],
        placement: SingleDevicePlacement | None = None,
        trained_names: Iterable[str] | None = None,
        rate_factors: Mapping[str, float] | None = None,
    ):
        self.parameters = parameters
        self.trained_names = set(trained_names or (name for name, _ in parameters))
        self.placement = placement or SingleDevicePlacement()
        self.max_grad_norm = train.max_grad_norm
        # Each parameter once, and its HF names.
        self._named = names_by_parameter(parameters)
        self.tensors = [self.placement.trained_tensor(p) for p, _ in self._named]
        factors = rate_factors or {}
        for (_, names), tensor in zip(self._named, self.tensors, strict=True):
            # What AdamW multiplies its rate with; its lr_ratio does the same on GPUs only.
            factor = _of_all(names, lambda name: factors.get(name, 1.0), "learning rate")
            tensor.optimize_attr = {"learning_rate": factor}
        with_decay: set[str] = set()
        self._adamw = AdamW(
            learning_rate=train.learning_rate,
            beta1=train.adam_beta1,
            beta2=train.adam_beta2,
            epsilon=train.adam_epsilon,
            parameters=self.tensors,
            weight_decay=train.weight_decay,
            apply_decay_param_fun=with_decay.__contains__,
        )
        # At stage 1 fleet takes whole parameters, and gives slices of them in their place.
        self._fleet = self.placement.trained if self.placement.trained.stage == 1 else None
        if self._fleet is not None:
            self._fleet.distribute(self._adamw)
        trained = [(self.placement.trained_tensor(p), names) for p, names in self._named]
        # Some of a parameter may be on other ranks, and none of it here.
        self.tensors = [tensor for tensor, _ in trained if tensor is not None]
        with_decay |= {
            tensor.name
            for tensor, names in trained
            if _of_all(names, decayed.__contains__, "weight decay") and tensor is not None
        }
        # Paddle makes state at the first step; a checkpoint is loaded before that.
        block = framework.default_main_program().global_block()
        self._adamw._create_accumulators(block, self.tensors)
        # Where the device's memory is the host's, reading a flag waits for nothing.
        self.masks_updates = not paddle.get_device().startswith("cpu")
        if self.masks_updates:
            self._keep_powers_on_device()

    @property
    def _names(self) -> set[str]:
        return {name for name, _ in self.parameters}

    @paddle.no_grad()
    def squared_norm(self, processes: SingleProcess = ONE_PROCESS) -> Tensor:
        """Float32 sum of squares over the gradients that this process counts, before clipping.

        Over all processes each parameter counts once, whatever it is spread over and wherever it is
        repeated.
        """
        if self.parameters and not self._gradients():
            raise RuntimeError(
                "no trained parameter has a gradient: the loss does not depend on any of them; "
                "check model.freeze against what the batches contain"
            )
        total = paddle.zeros([])
        for tensor in self.tensors:
            grad = gradient_of(tensor)
            if grad is not None and processes.counts_here(tensor):
                total = total + grad.astype("float32").square().sum()
        return total

    @paddle.no_grad()
    def update(self, learning_rate: float, norm: Tensor, is_good: Tensor) -> None:
        """Clip to max_grad_norm, and update every parameter that has a gradient; or change nothing.

        Parameters that are copies or gathered of what was updated follow it.

        Args:
            learning_rate: times a parameter's own factor.
            norm: of all gradients of the run, on the device.
            is_good: bool, on the device; where it is False all stays as it is, bit for bit.
        """
        # A stage of a pipeline may have nothing to train, and Paddle's optimizer then fails.
        if not self.tensors:
            return
        if self.masks_updates:
            factor = paddle.ones([])
            if self.max_grad_norm:
                factor = paddle.clip(self.max_grad_norm / (norm + 1e-6), max=1.0)
            self._adamw.mask(learning_rate, factor, is_good)
            self._step()
        elif bool(is_good):
            self.clip_gradients(norm.item())
            self.step(learning_rate)

    @paddle.no_grad()
    def clip_gradients(self, norm: float) -> None:
        """Scale gradients of a global `norm` above max_grad_norm down to it.

        Source: torch.nn.utils.clip_grad_norm_, whose factor is max_norm / (norm + 1e-6).
        """
        factor = self.max_grad_norm / (norm + 1e-6)
        if self.max_grad_norm and factor < 1.0:
            for grad in self._gradients():
                grad.scale_(factor)

    def step(self, learning_rate: float) -> None:
        """Update every parameter that has a gradient, at the rate times the parameter's factor."""
        self._adamw.unmask(learning_rate)
        self._step()

    def _step(self) -> None:
        if self._fleet is not None:
            self._fleet.step()
        else:
            self._adamw.step()
            self.placement.trained.all_gather_parameters()

    def clear_gradients(self) -> None:
        """Drop the gradients, without the zero fill that Paddle's default makes."""
        if self._fleet is not None:
            self._fleet.clear()
        elif self.tensors:
            self._adamw.clear_grad(set_to_zero=False)

    def state_tensors(self) -> dict[str, Tensor]:
        """All state by `HF name/state`, the live tensors; moments as the trained tensor.

        That of a fused parameter stands under each of its names.
        """
        return {
            f"{name}/{state}": tensor
            for names, state, _, tensor in self._states()
            if tensor is not None
            for name in names
        }

    def state_to_write(self) -> list[TensorToWrite]:
        """All state, whole; where ranks hold parts, all of them produce the arrays together."""
        states = [state for state in self._states() if not getattr(state[2], "is_tied_copy", False)]
        powers = {(id(p), state): t for _, state, p, t in states if not _has_layout(state)}
        power = powers.__getitem__
        if self._fleet is not None:
            power = self._fleet.numbers_of_all(powers)
        tensors = []
        for names, state, parameter, tensor in states:
            if _has_layout(state):
                shapes = self._shapes(parameter, names)
                # Of what this rank has nothing of, the others have all.
                own = paddle.zeros([0]) if tensor is None else tensor
                whole = partial(self.placement.whole_value, parameter, own, copy=False)
                produce = [whole]
                if len(names) > 1:
                    produce = SharedArray(whole, whole_slices(parameter)).parts()
            else:
                shapes = [(1,)] * len(names)
                produce = [partial(_host_value, power, (id(parameter), state))] * len(names)
            tensors += [
                TensorToWrite(f"{name}/{state}", shape, "F32", make)
                for name, shape, make in zip(names, shapes, produce, strict=True)
            ]
        return tensors

    def bytes_to_write(self) -> int:
        """Bytes of all state and of the parameters that it is for, whole."""
        states = sum(tensor.num_bytes for tensor in self.state_to_write())
        return states + sum(
            math.prod(self.placement.whole_shape(parameter)) * parameter.element_size()
            for parameter, _ in self._named
        )

    def _keep_powers_on_device(self) -> None:
        """Paddle keeps the powers of beta on the host, which would have to know what is skipped."""
        for state in ("beta1_pow_acc", "beta2_pow_acc"):
            powers = self._adamw._accumulators[state]
            for name, value in powers.items():
                powers[name] = value.to(paddle.get_device())

    def _states(self) -> Iterator[tuple[list[str], str, Tensor, Tensor | None]]:
        """HF names of a parameter, name of a state, the parameter and the live tensor, of all.

        The tensor is None where this rank has nothing of it.
        """
        for parameter, names in self._named:
            trained = self.placement.trained_tensor(parameter)
            for state in STATES:
                tensor = None
                if trained is not None:
                    tensor = self._adamw._get_accumulator_master(state, trained)
                yield names, state, parameter, tensor
            if parameter.dtype != paddle.float32:
                yield names, _MASTER, parameter, trained

    def _shapes(self, parameter: Tensor, names: list[str]) -> list[tuple[int, ...]]:
        """Of the whole parameter under each of its names."""
        whole = self.placement.whole_shape(parameter)
        if len(names) == 1:
            return [whole]
        return [(whole[0], columns.width) for columns in fused_columns(parameter)]

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set all state, bit for bit; every array is asked for once, when its turn comes.

        Raises:
            ValueError: every missing and unexpected entry, or every misshapen one.
        """
        names = {f"{name}/{state}" for names, state, _, _ in self._states() for name in names}
        elsewhere = {
            name for name in arrays if name.rpartition("/")[0] in self.trained_names - self._names
        }
        problems = [f"missing {name}" for name in sorted(names - arrays.keys())]
        problems += [f"unexpected {name}" for name in sorted(arrays.keys() - names - elsewhere)]
        if not problems:
            for names_of_one, state, parameter, tensor in self._states():
                problems += self._load(names_of_one, state, parameter, tensor, arrays)
        if problems:
            raise ValueError(
                "the saved optimizer state belongs to other trained parameters: "
                + "; ".join(problems)
            )

    def _load(
        self,
        names: list[str],
        state: str,
        parameter: Tensor,
        tensor: Tensor | None,
        arrays: Mapping[str, np.ndarray],
    ) -> list[str]:
        """Set one state from the arrays of all of the parameter's names; returns what is wrong."""
        found = {f"{name}/{state}": arrays[f"{name}/{state}"] for name in names}
        shapes = self._shapes(parameter, names) if _has_layout(state) else [(1,)] * len(names)
        problems = [
            f"{name} is {list(array.shape)}, not {list(shape)}"
            for (name, array), shape in zip(found.items(), shapes, strict=True)
            if array.shape != shape
        ]
        parts = [*found.values()]
        if not _has_layout(state) and len({array.tobytes() for array in parts}) > 1:
            problems.append(f"{', '.join(found)} differ, of linears that are trained as one")
        if problems or tensor is None:
            return problems
        array = parts[0]
        if _has_layout(state):
            whole = array if len(parts) == 1 else np.concatenate(parts, axis=1)
            array = self.placement.trained_part(parameter, whole)
        tensor.set_value(array)
        return []

    def _gradients(self) -> list[Tensor]:
        grads = map(gradient_of, self.tensors)
        return [grad for grad in grads if grad is not None]


def _host_value(find: Callable[[tuple], Tensor], key: tuple) -> np.ndarray:
    return find(key).numpy()


def _has_layout(state: str) -> bool:
    """Whether a state has its parameter's layout; the powers of beta are single numbers."""
    return not state.endswith("_pow_acc")


def _of_all(names: list[str], value_of: Callable[[str], Any], what: str) -> Any:
    """The one value of all names of a parameter.

    Raises:
        ValueError: they have several.
    """
    values = {name: value_of(name) for name in names}
    if len(set(values.values())) > 1:
        raise ValueError(
            f"{', '.join(names)} are trained as one weight but have different settings of their "
            f"{what}: {values}; separate the layer's projections first"
        )
    return values[names[0]]


def decayed_names(
    names: Iterable[str], exclude: list[str], parts: Mapping[str, Sequence[str]] = PARTS
) -> set[str]:
    """Names of the model's parameters that weight decay applies to.

    Args:
        names: of all parameters of the whole model, frozen ones too.
        exclude: patterns of train.weight_decay_exclude.
    """
    names = set(names)
    return names - matching_names(exclude, names, "train.weight_decay_exclude", parts)
