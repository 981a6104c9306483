"""What a run reports about itself: one JSON object a line in metrics.jsonl.

Keys of a line:
    `step`; `epoch`, passes over the training data so far.
    `loss`, mean cross entropy over the target tokens since the last line (null when every update
        was skipped), of a policy the weighted sum of `MSE` and `CE`, which stand beside it. With
        the load-balancing loss (`output_router_logits` of the model's configuration) it includes
        that; `eval_loss` does not.
    `learning_rate` and `grad_norm` (before clipping, null if not finite) of the last step;
        `learning_rate/PART`, for each of train.part_learning_rates.
    `samples_per_second` and `tokens_per_second` of training alone, by the slowest process;
        `step_seconds`, the processes' mean, and `step_seconds_max`, of the slowest;
        `data_wait_seconds`, how much of a step was spent waiting for data, of the worst process;
        `mfu`, the share of what the devices can compute at most that went into the model's own
        operations (padding and recomputation are none), where that is known;
        `memory_gb`, the most that a process held, of tensors on a GPU, of all on a CPU.
    `sequence_length_min`, `_mean` and `_max`, real tokens of the samples; `packing_efficiency` with
        data.packing, the share of real tokens in rows. Of these, as of times, a run that continues
        begins anew.
    `target_tokens`, `skipped_updates` and `skipped_samples` of the whole run so far.
    `tokens_per_expert_min`, `_mean` and `_max`, see `paddle_vl.families.qwen3_vl.objective`.
    `eval_loss` in steps that evaluate, of a policy with its terms. A line of an evaluation between
        two reports has `step` and the evaluation's entries only.
What is not said to be of the run is since the last line, or start.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.nn.loss import Loss, weighted_loss
from paddle_vl.train.reporting.gauges import Gauge
from paddle_vl.train.step import MicroBatch, StepOutcome

Values = Mapping[str, Any]


class StepMeter:
    """Collects steps between two reports, and counts over the whole run.

    What lies on the device is collected there, and read when a report is.

    Args:
        peak_flops: operations per second that this process's device has at most, if known.
    """

    def __init__(self, loss: Loss, peak_flops: float | None = None):
        self._loss, self._peak_flops = loss, peak_flops
        nothing = paddle.zeros([len(loss.terms)], dtype="float64")
        # Of each term what the run has counted; the window is what came since the last report.
        self._counted, self._sums, self._counts = nothing, nothing, nothing
        # Skipped updates: all, in a row until now, and in a row at most since the last report.
        self._skips = paddle.zeros([3], dtype="float64")
        self._grad_norm: Tensor = paddle.full([], math.nan)
        self._begin_window()

    @paddle.no_grad()
    def add(
        self,
        outcome: StepOutcome,
        micro_batches: Sequence[MicroBatch],
        seconds: float,
        data_wait_s: float = 0.0,
    ) -> None:
        """Count one step of this process, that took `seconds` of which it waited for data."""
        totals = outcome.totals
        self._steps += 1
        self._samples += totals.num_samples
        self._tokens += totals.num_tokens
        self._places += totals.num_packed_places
        self._seconds += seconds
        self._data_wait_s += data_wait_s
        self._flops += sum(batch.flops for batch in micro_batches)
        for length in (length for batch in micro_batches for length in batch.lengths):
            self._lengths.append(length)
        counts = paddle.stack([paddle.full([], count, "float64") for count in totals.counts])
        counts = paddle.where(outcome.is_good, counts, paddle.zeros_like(counts))
        sums = outcome.terms.astype("float64") * counts
        self._sums = self._sums + paddle.where(outcome.is_good, sums, paddle.zeros_like(sums))
        self._counts, self._counted = self._counts + counts, self._counted + counts
        is_bad = 1.0 - outcome.is_good.astype("float64")
        everything, in_a_row, longest = self._skips
        in_a_row = (in_a_row + 1.0) * is_bad
        longest = paddle.maximum(longest, in_a_row)
        self._skips = paddle.stack([everything + is_bad, in_a_row, longest])
        self._grad_norm = outcome.grad_norm

    def gauges(self, counts_data: bool) -> list[Gauge]:
        """What a report is made of, of this process; a new window begins.

        Args:
            counts_data: whether this process speaks for its part of the data.
        """
        lengths = self._lengths if counts_data else []
        # Of none neither is the least nor the most.
        extremes = (min(lengths), max(lengths)) if lengths else (math.inf, -math.inf)
        gauges = [
            Gauge("sums", "same", self._sums),
            Gauge("counts", "same", self._counts),
            Gauge("counted", "same", self._counted),
            Gauge("skips", "same", self._skips),
            Gauge("grad_norm", "same", self._grad_norm),
            Gauge("steps", "same", self._steps),
            Gauge("samples", "same", self._samples),
            Gauge("tokens", "same", self._tokens),
            Gauge("places", "same", self._places),
            Gauge("seconds", "mean", self._seconds),
            Gauge("seconds_max", "max", self._seconds),
            Gauge("data_wait", "max", self._data_wait_s),
            Gauge("flops", "sum", self._flops if counts_data else 0),
            Gauge("peak_flops", "sum", self._peak_flops or 0.0),
            Gauge("length_min", "min", extremes[0]),
            Gauge("length_max", "max", extremes[1]),
            Gauge("length_sum", "sum", sum(lengths)),
            Gauge("length_count", "sum", len(lengths)),
        ]
        self._begin_window()
        return gauges

    def line(self, values: Values) -> dict[str, Any]:
        """The window's part of a metrics line, from the gauges of all processes."""
        loss = self._loss
        line: dict[str, Any] = {"loss": None}
        means = dict.fromkeys(loss.terms)
        if values["counts"].all():
            numbers = (values["sums"] / values["counts"]).tolist()
            means = dict(zip(loss.terms, numbers, strict=True))
            line["loss"] = weighted_loss(numbers, loss)
        if len(means) > 1:
            line |= means
        norm = float(values["grad_norm"].item())
        line["grad_norm"] = norm if math.isfinite(norm) else None
        line |= _speed(values)
        if values["length_count"]:
            line["sequence_length_min"] = int(values["length_min"])
            mean = values["length_sum"] / values["length_count"]
            line["sequence_length_mean"] = round(mean, 1)
            line["sequence_length_max"] = int(values["length_max"])
        for term, name in loss.reported_counts.items():
            line[name] = int(values["counted"][list(loss.terms).index(term)])
        line["skipped_updates"] = int(values["skips"][0])
        if values["places"]:
            line["packing_efficiency"] = round(values["tokens"] / values["places"], 4)
        return line

    @property
    def skipped_in_a_row(self) -> int:
        """Until now; read from the device."""
        return int(self._skips[1].item())

    def _begin_window(self) -> None:
        self._sums, self._counts = paddle.zeros_like(self._sums), paddle.zeros_like(self._counts)
        everything, in_a_row, _ = self._skips
        self._skips = paddle.stack([everything, in_a_row, paddle.zeros_like(in_a_row)])
        self._steps, self._samples, self._tokens, self._places = 0, 0, 0, 0
        self._seconds, self._data_wait_s, self._flops = 0.0, 0.0, 0
        self._lengths: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        """What a run that continues goes on from; read from the device."""
        tensors = (self._counted, self._skips, self._sums, self._counts)
        counted, skips, *window = (tensor.tolist() for tensor in tensors)
        return {"counted": counted, "skips": skips, "window": window}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        tensors = (state["counted"], state["skips"], *state["window"])
        self._counted, self._skips, self._sums, self._counts = (
            paddle.to_tensor(np.array(values, dtype=np.float64)) for values in tensors
        )


def longest_skip(values: Values) -> int:
    """Skipped updates in a row at most since the last report."""
    return int(values["skips"][2])


def _speed(values: Values) -> dict[str, float]:
    seconds, steps = values["seconds_max"], values["steps"]
    if not steps or not seconds:
        return {}
    amounts = {"samples_per_second": values["samples"], "tokens_per_second": values["tokens"]}
    speed = {name: round(amount / seconds, 1) for name, amount in amounts.items() if amount}
    if values["peak_flops"] and values["flops"]:
        speed["mfu"] = round(values["flops"] / (seconds * values["peak_flops"]), 4)
    return speed | {
        "step_seconds": round(values["seconds"] / steps, 4),
        "step_seconds_max": round(seconds / steps, 4),
        "data_wait_seconds": round(values["data_wait"] / steps, 4),
    }
