"""Comparison of all ranks of a topology with a single device."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from paddle import Tensor, nn

from paddle_vl.config.parallel_settings import FleetConfig
from paddle_vl.nn.placement import Placement, SingleDevicePlacement
from paddle_vl.testing.gathering import gather_gradients
from paddle_vl.testing.ranks import Ranks, full_logits, run_ranks, sum_partial_gradients

# Gradients below this part of the model's largest entry are rounding, such as those of key biases.
_NEGLIGIBLE = 1e-4
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
    timeout_s: float | None = 60.0,
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
        sequence_parallel, vision, fleet, timeout_s: see `run_ranks`.

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
        timeout_s=timeout_s,
    )
    outputs = [output for output, _ in ranks.results]
    gradients = gather_gradients([model for _, model in ranks.results], partial_are_summed=True)
    found = _quantities(outputs[0], gradients)
    if "logits" in found:
        found["logits"] = _array(full_logits([output.logits for output in outputs]))
    for rank, output in enumerate(outputs):
        found[f"loss of rank {rank}"] = _array(_loss(output))
        wanted[f"loss of rank {rank}"] = wanted["loss"]
    problems = sorted(_differences(found, wanted, tolerance), reverse=True)
    if problems:
        shown = "; ".join(text for _, text in problems[:_NUM_SHOWN])
        rows = " with sequence parallelism" if sequence_parallel else ""
        raise AssertionError(
            f"mp_degree {mp_degree}{rows}: {len(problems)} of {len(wanted)} tensors differ from "
            f"the single device's, the worst first: {shown}"
        )
    return ranks


def _differences(
    found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], tolerance: float
) -> Iterator[tuple[float, str]]:
    """Relative error and description of all tensors that differ."""
    gradients = [array for name, array in wanted.items() if name.startswith("gradient")]
    least = _NEGLIGIBLE * max((np.abs(array).max(initial=0.0) for array in gradients), default=0)
    for name in sorted({*found, *wanted}):
        one, other = found.get(name), wanted.get(name)
        if one is None or other is None:
            # One device has no gradient of a tower without an image, and ranks have zeros.
            present = one if other is None else other
            if other is None and present is not None and not present.any():
                continue
            yield np.inf, f"{name} is missing on {'the ranks' if one is None else 'one device'}"
        elif one.shape != other.shape:
            yield np.inf, f"{name} is {list(one.shape)} instead of {list(other.shape)}"
        else:
            error = float(np.abs(one - other).max(initial=0.0))
            size = float(np.abs(other).max(initial=0.0))
            size = max(size, least) if name.startswith("gradient") else size
            # Written so that NaN differs.
            if not error <= tolerance * size:
                yield (
                    error / size if size else np.inf,
                    f"{name} by {error:.3g} (largest entry {size:.3g})",
                )


def _quantities(output: Any, gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    quantities = {"loss": _array(_loss(output))}
    logits = getattr(output, "logits", None)
    if logits is not None:
        quantities["logits"] = _array(logits)
    return quantities | {f"gradient of {key}": array for key, array in gradients.items()}


def _loss(output: Any) -> Tensor:
    loss = output if isinstance(output, Tensor) else output.loss
    if loss is None:
        raise ValueError("the output has no loss: give the model labels")
    return loss


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().astype("float32").numpy()
