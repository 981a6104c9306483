"""Comparison of the ranks of a topology with a single device, and with each other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from paddle import Tensor, nn

from paddle_vl.config.parallel_settings import FleetConfig
from paddle_vl.nn.placement import Placement, SingleDevicePlacement
from paddle_vl.parallel.recorder import Collective
from paddle_vl.parallel.simulated.ranks import Ranks, run_ranks, sum_partial_gradients
from paddle_vl.testing.tensors import as_array, gather_gradients

# Gradients below this part of the model's largest entry are rounding, such as those of key biases.
NEGLIGIBLE = 1e-4
_NUM_SHOWN = 8


def assert_equals_single_device(
    build: Callable[[Placement], nn.Layer],
    step: Callable[[Any], Any],
    mp_degree: int,
    *,
    sequence_parallel: bool = True,
    vision: str = "spread",
    fleet: FleetConfig | None = None,
    tolerance: float = 1e-5,
) -> Ranks[Any]:
    """Check that all ranks together compute what a single device does.

    Compares the loss of every rank, the logits put together from all ranks if the output has some,
    and every gradient put together from all ranks, after the summation that a run does.

    Args:
        build: a model with the same full parameters for every placement, such as
            `tiny_qwen3_vl`.
        step: runs the model on the same inputs each time; returns a loss, or an output with
            `.loss` and optionally `.logits` `[..., V]`. The backward pass runs here.
        tolerance: largest allowed error relative to the largest entry of each tensor; float32
            sums in another order differ by about 1e-6.
        sequence_parallel, vision, fleet: see `run_ranks`.

    Returns:
        The ranks; a result is the output of `step` and the model.

    Raises:
        AssertionError: something differs; lists the tensors with the largest errors.
        Exception: see `run_ranks`.
    """
    model = build(SingleDevicePlacement())
    output = step(model)
    _loss(output).backward()
    wanted = _quantities(output, gather_gradients([model]))

    def on_rank(placement: Placement) -> tuple[Any, nn.Layer]:
        model = build(placement)
        output = step(model)
        _loss(output).backward()
        sum_partial_gradients(model)
        return output, model

    ranks = run_ranks(
        on_rank,
        mp_degree,
        sequence_parallel=sequence_parallel,
        vision=vision,
        fleet=fleet,
    )
    outputs = [output for output, _ in ranks.results]
    gradients = gather_gradients([model for _, model in ranks.results], partial_are_summed=True)
    found = _quantities(outputs[0], gradients)
    if "logits" in found:
        found["logits"] = np.concatenate([as_array(x.logits) for x in outputs], axis=-1)
    for rank, output in enumerate(outputs):
        found[f"loss of rank {rank}"] = as_array(_loss(output))
        wanted[f"loss of rank {rank}"] = wanted["loss"]
    # One device has no gradient of a tower without an image, and ranks have zeros.
    found = {name: array for name, array in found.items() if name in wanted or array.any()}
    problems = [d for d in differences(found, wanted, NEGLIGIBLE) if not d.error <= tolerance]
    if problems:
        shown = "; ".join(problem.text for problem in problems[:_NUM_SHOWN])
        rows = " with sequence parallelism" if sequence_parallel else ""
        raise AssertionError(
            f"mp_degree {mp_degree}{rows}: {len(problems)} of {len(wanted)} tensors differ from "
            f"the single device's, the worst first: {shown}"
        )
    return ranks


class Difference(NamedTuple):
    """A tensor compared with another.

    Attributes:
        error: largest difference relative to the largest entry; infinite for NaN, another shape,
            or a tensor that is missing.
        text: the tensor and its difference in words.
    """

    error: float
    name: str
    text: str


def differences(
    found: Mapping[str, np.ndarray],
    wanted: Mapping[str, np.ndarray],
    negligible: float = 0.0,
    least: float = 0.0,
) -> list[Difference]:
    """Compare tensors by name; all of them, the worst first.

    Args:
        negligible: entries of tensors called `gradient...` below this part of the largest such
            entry are rounding, as of key biases: errors are relative to that much at least.
        least: errors of all tensors are relative to this much at least.
    """
    sizes = {name: float(np.abs(array).max(initial=0.0)) for name, array in wanted.items()}
    largest = max((sizes[name] for name in sizes if name.startswith("gradient")), default=0.0)
    compared = []
    for name in sorted({*found, *wanted}):
        one, other = found.get(name), wanted.get(name)
        error, text = np.inf, f"{name} is {'missing' if one is None else 'not expected'}"
        if one is not None and other is not None and one.shape != other.shape:
            text = f"{name} is {list(one.shape)} instead of {list(other.shape)}"
        elif one is not None and other is not None:
            size = max(sizes[name], negligible * largest if name.startswith("gradient") else least)
            apart = float(np.abs(one - other).max(initial=0.0))
            text = f"{name} by {apart:.3g} (largest entry {sizes[name]:.3g})"
            if apart <= np.inf:
                error = apart / size if size else np.inf if apart else 0.0
        compared.append(Difference(error, name, text))
    return sorted(compared, key=lambda difference: -difference.error)


def _quantities(output: Any, gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    quantities = {"loss": as_array(_loss(output))}
    logits = getattr(output, "logits", None)
    if logits is not None:
        quantities["logits"] = as_array(logits)
    return quantities | {f"gradient of {key}": array for key, array in gradients.items()}


def _loss(output: Any) -> Tensor:
    loss = output if isinstance(output, Tensor) else output.loss
    if loss is None:
        raise ValueError("the output has no loss: give the model labels")
    return loss


def first_difference(calls_of_ranks: Sequence[Sequence[Collective]]) -> str | None:
    """The first difference between the ranks' recordings; None if there is none.

    Compares kind, dtype, shape and phase of every collective with those on the group's first rank,
    and dtype and shape of every message with those on the other rank.

    Args:
        calls_of_ranks: of all ranks, by global rank.

    Raises:
        ValueError: a call involves a rank without a recording.
    """
    channels = dict.fromkeys(_channel(call) for calls in calls_of_ranks for call in calls)
    last = max((rank for _, ranks in channels for rank in ranks), default=-1)
    if last >= len(calls_of_ranks):
        raise ValueError(
            f"rank {last} takes part in the calls, but there are recordings of "
            f"{len(calls_of_ranks)} ranks: give those of all ranks"
        )
    for channel in channels:
        is_message, ranks = channel
        first, *others = dict.fromkeys(ranks)
        own = [[call for call in calls if _channel(call) == channel] for calls in calls_of_ranks]
        for other in others:
            pairs = zip(own[first], own[other], strict=False)
            same = [
                one.agreed == two.agreed and (is_message or one.phase == two.phase)
                for one, two in pairs
            ]
            position = same.index(False) if False in same else len(same)
            if position < max(len(own[first]), len(own[other])):
                what = "message" if is_message else "collective"
                return (
                    f"{what} {position + 1} of ranks {list(ranks)}: "
                    f"rank {first} {_at(own[first], position)}, "
                    f"rank {other} {_at(own[other], position)}"
                )
    return None


def _at(calls: Sequence[Collective], position: int) -> str:
    if position < len(calls):
        return calls[position].describe()
    return f"nothing, its last {calls[-1].describe()}" if calls else "nothing at all"


def _channel(call: Collective) -> tuple[bool, tuple[int, ...]]:
    """Key of the calls whose order must be the same on all of their ranks: the collectives of a
    group, or the messages from one rank to another."""
    return call.is_message, call.ranks
