"""AdamW on float32 master weights of bfloat16 parameters: steps, clipping, a missing gradient.

The case was written after its last step, from tensors that the steps had changed in place, so
`init.*` and the values of every step are the final ones. Only the final values are compared, from
initial bfloat16 values that lead to them.
"""

from collections.abc import Iterator

import numpy as np
import paddle

from paddle_vl.config.schema import TrainConfig
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.train.optimizer import Optimizer
from parity.comparison import CaseReport
from parity.pi07_golden import GoldenCase
from parity.pi07_quantities import Comparison, array

# Step and parameter whose gradient is dropped, although the case has one.
_WITHOUT_GRADIENT = (3, "p1")


def run_optimizer(case: GoldenCase, report: CaseReport) -> None:
    """Run all steps with the package's master weights and optimizer."""
    given = case.tensors
    init = {name[5:]: value for name, value in given.items() if name.startswith("init.")}
    moved = [name for name in init if f"step0.master.{name}" in given]
    last = max(int(name[4]) for name in given if name.startswith("step"))
    if all(_is_end(given, name, last) for name in moved):
        *_, end = _steps(case, init)
        for name in moved:
            travelled = end[f"step{last}.master.{name}"] - init[name]
            init[name] = _bfloat16(given[f"step{last}.master.{name}"] - travelled)
        found = list(_steps(case, init))
        end = {name.partition(".")[2]: value for name, value in found[-1].items()}
        states = [
            {f"step{n}.{name}": value for name, value in end.items() if name != "grad_norm"}
            | {name: value for name, value in values.items() if name.endswith("grad_norm")}
            for n, values in enumerate(found)
        ]
    else:
        states = list(_steps(case, init))
    compare = Comparison(case, report)
    for values in states:
        for name, value in values.items():
            compare.check(name.split(".")[1], {name: value})
    compare.compared |= {n for n in given if ".grad." in n or n.startswith("init.")}
    compare.all_compared("")


def _is_end(given: dict[str, np.ndarray], name: str, last: int) -> bool:
    """Whether all arrays of a parameter have the values of the last step."""
    masters = [given[f"step{n}.master.{name}"] for n in range(last + 1)]
    is_constant = all(np.array_equal(master, masters[0]) for master in masters)
    return is_constant and np.array_equal(given[f"init.{name}"], given[f"step{last}.live.{name}"])


def _steps(case: GoldenCase, init: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Master weights, parameters and gradient norm after each step, by golden names."""
    given, settings, layer = case.tensors, case.meta["adamw"], paddle.nn.Layer()
    for name, value in init.items():
        parameter = layer.create_parameter(value.shape, dtype="bfloat16")
        paddle.assign(paddle.to_tensor(value).astype("bfloat16"), parameter)
        layer.add_parameter(name, parameter)
    parameters = dict(layer.named_parameters())
    store = MasterWeights(list(parameters.values()))
    train = TrainConfig(
        output_dir="unused",
        learning_rate=settings["lr"],
        adam_beta1=settings["betas"][0],
        adam_beta2=settings["betas"][1],
        adam_epsilon=settings["eps"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=case.meta["clip"],
    )
    optimizer = Optimizer(list(parameters.items()), train, set(parameters), store)
    for n in range(len({name[:5] for name in given if name.startswith("step")})):
        for name, parameter in parameters.items():
            grad = given.get(f"step{n}.grad.{name}")
            if grad is not None and (n, name) != _WITHOUT_GRADIENT:
                parameter.grad = paddle.to_tensor(grad).astype("bfloat16")
        store.end_backward()
        found = {}
        if f"step{n}.grad_norm" in given:
            norm = float(optimizer.squared_norm().sqrt())
            found[f"step{n}.grad_norm"] = np.float32(norm)
            optimizer.clip_gradients(norm)
        optimizer.step(train.learning_rate)
        optimizer.clear_gradients()
        for name, parameter in parameters.items():
            found[f"step{n}.master.{name}"] = array(store.shard_of(parameter))
            found[f"step{n}.live.{name}"] = array(parameter)
        yield found


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return array(paddle.to_tensor(values).astype("bfloat16"))
