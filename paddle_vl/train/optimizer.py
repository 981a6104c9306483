"""AdamW over named parameters: gradient norm, clipping, and a state that is saved by HF name.

Paddle names optimizer state after counters that differ from process to process, so the state is
read and written here through the parameter it belongs to.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import paddle
from paddle import Tensor
from paddle.base import framework

from paddle_vl.config.schema import TrainConfig
from paddle_vl.models.checkpoint.safetensors_io import TensorToWrite
from paddle_vl.nn.placement import SingleDevicePlacement
from paddle_vl.train.freeze import NamedParameters, matching_names
from paddle_vl.train.processes import ONE_PROCESS, SingleProcess

# Paddle's names of the state it keeps for a parameter; the powers of beta advance with its updates.
_STATES = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
_MASTER = "master_weight"


class Optimizer:
    """AdamW with global-norm clipping.

    Args:
        parameters: HF names and parameters to train. Those of a half type get a float32 master
            weight, which is what the updates go to.
        train: the optimizer's settings.
        decayed: names with weight decay, see `decayed_names`.
        placement: says what this rank holds of each parameter.
    """

    def __init__(
        self,
        parameters: NamedParameters,
        train: TrainConfig,
        decayed: set[str],
        placement: SingleDevicePlacement | None = None,
    ):
        self.parameters = parameters
        self.placement = placement or SingleDevicePlacement()
        self.max_grad_norm = train.max_grad_norm
        tensors = [parameter for _, parameter in parameters]
        with_decay = {parameter.name for name, parameter in parameters if name in decayed}
        self._adamw = paddle.optimizer.AdamW(
            learning_rate=train.learning_rate,
            beta1=train.adam_beta1,
            beta2=train.adam_beta2,
            epsilon=train.adam_epsilon,
            parameters=tensors,
            weight_decay=train.weight_decay,
            apply_decay_param_fun=with_decay.__contains__,
            multi_precision=True,
        )
        # Paddle makes state at the first step; a checkpoint is loaded before that.
        self._adamw._create_accumulators(framework.default_main_program().global_block(), tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters it trains."""
        return [parameter for _, parameter in self.parameters]

    @paddle.no_grad()
    def gradient_norm(self, processes: SingleProcess = ONE_PROCESS) -> Tensor:
        """Float32 norm over the gradients of all trained parameters, before clipping.

        Each parameter counts once: one that ranks hold in parts by the sum of all parts, one that
        each of them holds whole by this rank's.
        """
        if not self._gradients():
            raise RuntimeError(
                "no trained parameter has a gradient: the loss does not depend on any of them; "
                "check model.freeze against what the batches contain"
            )
        in_parts, whole = paddle.zeros([]), paddle.zeros([])
        for _, parameter in self.parameters:
            if parameter.grad is not None:
                square = parameter.grad.astype("float32").square().sum()
                if parameter.is_distributed:
                    in_parts = in_parts + square
                else:
                    whole = whole + square
        return (processes.sum_over_parts(in_parts) + whole).sqrt()

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
        """Update every parameter that has a gradient."""
        self._adamw.set_lr(learning_rate)
        self._adamw.step()

    def clear_gradients(self) -> None:
        """Drop the gradients, without the zero fill that Paddle's default makes."""
        self._adamw.clear_grad(set_to_zero=False)

    def state_tensors(self) -> dict[str, Tensor]:
        """All state by `HF name/state`, the live tensors; moments have the parameter's layout."""
        return {name: tensor for name, _, tensor in self._states()}

    def state_to_write(self) -> list[TensorToWrite]:
        """All state, whole; where ranks hold parts, all of them produce the arrays together."""
        return [
            TensorToWrite(
                name,
                self.placement.whole_shape(parameter)
                if tensor.shape == parameter.shape
                else tuple(tensor.shape),
                "F32",
                partial(self.placement.whole_value, parameter, tensor),
            )
            for name, parameter, tensor in self._states()
        ]

    def _states(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, parameter and live tensor of every state."""
        for name, parameter in self.parameters:
            for state in _STATES:
                tensor = self._adamw._get_accumulator_master(state, parameter)
                yield f"{name}/{state}", parameter, tensor
            if parameter.name in self._adamw._master_weights:
                yield f"{name}/{_MASTER}", parameter, self._adamw._master_weights[parameter.name]

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set all state, bit for bit; every array is asked for once, when its turn comes.

        Raises:
            ValueError: every missing and unexpected entry, or every misshapen one.
        """
        names = {name for name, _, _ in self._states()}
        problems = [f"missing {name}" for name in sorted(names - arrays.keys())]
        problems += [f"unexpected {name}" for name in sorted(arrays.keys() - names)]
        if not problems:
            for name, parameter, tensor in self._states():
                array = self.placement.own_part(parameter, arrays[name])
                if list(array.shape) == list(tensor.shape):
                    tensor.set_value(array)
                else:
                    problems.append(f"{name} is {list(array.shape)}, not {list(tensor.shape)}")
        if problems:
            raise ValueError(
                "the saved optimizer state belongs to other trained parameters: "
                + "; ".join(problems)
            )

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for _, parameter in self.parameters if parameter.grad is not None]


def decayed_names(parameters: NamedParameters, exclude: list[str]) -> set[str]:
    """Names of the model's parameters that weight decay applies to.

    Args:
        parameters: those of the whole model, frozen ones too.
        exclude: patterns of train.weight_decay_exclude.
    """
    names = {name for name, _ in parameters}
    return names - matching_names(exclude, names, "train.weight_decay_exclude")
