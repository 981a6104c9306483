"""Metrics of training steps, reported as one JSON object per line of metrics.jsonl.

Keys of a line, since the previous line or start unless it says "whole run":
    `step`; `epoch`: passes over the training data, whole run.
    `loss`: mean cross entropy over target tokens, null if every update was skipped; for a policy
        the weighted sum of `MSE` and `CE`, which are reported too, as are the terms of preference
        training (docs/preference.md; null where no answer counts). It includes a load-balancing
        loss (`output_router_logits` of the model configuration); `eval_loss` does not.
    `loss/SOURCE` of each source of a training mix or mixture: mean cross entropy over its target
        tokens, without loss weights and load-balancing loss; left out if it had none.
    `learning_rate` and `grad_norm` (before clipping, null if not finite) of the last step;
        `learning_rate/PART` for each entry of train.part_learning_rates.
    `samples_per_second`, `tokens_per_second`: of training without evaluations and checkpoints, by
        the slowest rank; `step_seconds`: mean over ranks; `step_seconds_max`: slowest rank;
        `data_wait_seconds`: seconds per step that the worst rank waited for data.
    `mfu`: model FLOPs (without padding and recomputation) over the devices' peak, if known.
    `memory_gb`: of the worst rank, peak of allocated tensors on a GPU, resident set on a CPU.
    `sequence_length_min`, `_mean`, `_max`: real tokens of the samples; `packing_efficiency` with
        data.packing: share of real tokens in packed rows. These and times restart on resume, and:
    `tokens_per_step_sum`, `_mean`, `_min`, `_max`: over data ranks, real tokens of a rank in a
        step, averaged over the steps; `token_imbalance`: the most over the mean, 1 if equal;
    `rank_sequence_length_sum`, `_mean`, `_min`, `_max`: over data ranks, mean real tokens of a
        rank's samples. See `paddle_vl.train.reporting.rank_tokens`.
    `tokens`: of all ranks, visual ones included and padding not, whole run; train.max_tokens
        counts these. A run continued from a checkpoint of an earlier version counts from there.
    `tokens/SOURCE`, `documents/SOURCE`, `epochs/SOURCE` of each source of a mix: tokens, documents
        that began, and passes over its documents, of all ranks, whole run.
    `target_tokens`, `skipped_updates`, `skipped_samples`: whole run.
    `repeated_steps` with parallel.expert_capacity_factor: steps repeated with exact sizes.
    `tokens_per_expert_min`, `_mean`, `_max`: see `paddle_vl.families.vlm.training.objective`.
    `eval_loss`, for a policy also its terms: in steps that evaluate. An evaluation between two
        reports has its own line. If data.eval has sources also `eval_perplexity` (exp of the loss)
        and `eval_loss/SOURCE`, `eval_perplexity/SOURCE` of each. Of a policy `eval_action_mae/DIM`
        and `eval_action_rmse/DIM`, see `paddle_vl.families.policy.action_errors`. With train.eval
        `eval_METRIC` of the generated answers, `eval_answer_tokens`, the time they took
        (`eval_answer_seconds`) and the memory of the worst rank (`eval_answer_memory_gb`).

Shapes: S sources of a mix.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import paddle
from paddle import Tensor
from pydantic import Field

from paddle_vl.batch.schema import HostBatch
from paddle_vl.families.base import MeanLosses, Measure
from paddle_vl.files.stored_settings import Count, Listed, Number, checked, read_section
from paddle_vl.files.text_file import shown
from paddle_vl.nn.objective import Loss, weighted_loss
from paddle_vl.train.checkpoint import complete_checkpoints
from paddle_vl.train.reporting.rank_tokens import token_entries
from paddle_vl.train.reporting.reporter import OwnValues
from paddle_vl.train.step import StepOutcome

logger = logging.getLogger(__name__)
# Values of all ranks by name, see `paddle_vl.train.reporting.reporter.by_rank`.
Values = Mapping[str, np.ndarray]
# A count of a device's tensor, which has floats.
_Count = Annotated[Number, Field(ge=0, le=1 << 53)]
# What is summed over the steps of a window.
_OF_ALL_RANKS = ("steps", "samples", "tokens", "places")
_OF_THIS_RANK = ("seconds", "data_wait", "flops")


@checked
class _MeterState:
    """A state, see `StepMeter.state_dict`."""

    counted: list[_Count]
    skips: Listed[tuple[_Count, _Count, _Count]]
    window: Listed[tuple[list[Number], list[Number]]]
    sources: dict[str, Any] | None = None


@checked
class _SourceSums:
    """Of each source: count of the run, and sum and count of the window."""

    names: list[str]
    values: Listed[tuple[list[Number], list[Number], list[Number]]]


class StepMeter:
    """Accumulates metrics between two reports (the window) and over the whole run.

    Losses, norms and counts stay on the device until a report is read.

    Args:
        peak_flops: peak FLOP/s of this rank's device, if known.
        sources: names of the sources whose losses steps have.
    """

    def __init__(self, loss: Loss, peak_flops: float | None = None, sources: Sequence[str] = ()):
        self._loss, self._peak_flops, self._sources = loss, peak_flops, list(sources)
        zeros = paddle.zeros([len(loss.terms) + len(sources)], dtype="float64")
        # Per loss term, then per source: count of the whole run, sum and count of the window.
        self._counted, self._sums, self._counts = zeros, zeros, zeros
        # Skipped updates: whole run, current streak, longest streak in the window.
        self._skips = paddle.zeros([3], dtype="float64")
        self._grad_norm: Tensor = paddle.full([], math.nan)
        self._begin_window()

    @paddle.no_grad()
    def add(
        self,
        outcome: StepOutcome,
        micro_batches: Sequence[HostBatch],
        seconds: float,
        data_wait_s: float = 0.0,
    ) -> None:
        """Add a step.

        Args:
            micro_batches: of this rank.
            seconds: duration of the step on this rank, including `data_wait_s`.
        """
        totals = outcome.totals
        self._window.update(
            steps=1,
            samples=totals.num_samples,
            tokens=totals.num_tokens,
            places=totals.num_packed_places,
            seconds=seconds,
            data_wait=data_wait_s,
            flops=sum(batch.flops for batch in micro_batches),
        )
        lengths = [length for batch in micro_batches for length in batch.lengths]
        self._lengths.extend(lengths)
        self._step_tokens.append(sum(lengths))
        numbers = (*totals.counts, *totals.source_targets)
        counts = paddle.stack([paddle.full([], count, "float64") for count in numbers])
        counts = paddle.where(outcome.is_good, counts, paddle.zeros_like(counts))
        if outcome.source_sums is None:
            sums = outcome.terms.astype("float64") * counts
        else:
            sums = outcome.terms.astype("float64") * counts[: len(totals.counts)]
            sums = paddle.concat([sums, outcome.source_sums.astype("float64")])
        self._sums = self._sums + paddle.where(outcome.is_good, sums, paddle.zeros_like(sums))
        self._counts, self._counted = self._counts + counts, self._counted + counts
        is_bad = 1.0 - outcome.is_good.astype("float64")
        total, streak, longest = self._skips
        streak = (streak + 1.0) * is_bad
        self._skips = paddle.stack([total + is_bad, streak, paddle.maximum(longest, streak)])
        self._grad_norm = outcome.grad_norm

    def values(self, counts_data: bool) -> OwnValues:
        """Values of this rank for a report; begins a new window.

        Args:
            counts_data: False on ranks that load the same samples as another rank.
        """
        lengths = self._lengths
        values: dict[str, float | Tensor] = {
            # The same on all ranks.
            "sums": self._sums,
            "counts": self._counts,
            "counted": self._counted,
            "skips": self._skips,
            "grad_norm": self._grad_norm,
            **{name: self._window[name] for name in _OF_ALL_RANKS},
            # Of this rank.
            **{name: self._window[name] for name in _OF_THIS_RANK},
            "peak_flops": self._peak_flops or 0.0,
            # Of this rank's data.
            "counts_data": counts_data,
            "length_min": min(lengths, default=0),
            "length_max": max(lengths, default=0),
            "length_sum": sum(lengths),
            "length_count": len(lengths),
        }
        if self._step_tokens:
            values["step_tokens"] = paddle.stack(
                [paddle.full([], count, dtype="float64") for count in self._step_tokens]
            )
        self._begin_window()
        return values

    def line(self, values: Values) -> dict[str, Any]:
        """Entries of a metrics line.

        Args:
            values: `values` of all ranks.
        """
        loss = self._loss
        line: dict[str, Any] = {"loss": None}
        means: dict[str, float | None] = dict.fromkeys(loss.terms)
        num_terms = len(means)
        sums, counts = values["sums"][0], values["counts"][0]
        if all(counts[i] for i, weight in enumerate(loss.terms.values()) if weight):
            numbers = (sums[:num_terms] / np.maximum(counts[:num_terms], 1)).tolist()
            line["loss"] = weighted_loss(numbers, loss)
            # A term that is only reported may lack data.
            means = {
                name: number if count else None
                for name, number, count in zip(loss.terms, numbers, counts, strict=False)
            }
        if len(means) > 1:
            line |= means
        of_sources = zip(self._sources, sums[num_terms:], counts[num_terms:], strict=True)
        line |= {f"loss/{name}": float(of / count) for name, of, count in of_sources if count}
        norm = float(values["grad_norm"][0].item())
        line["grad_norm"] = norm if math.isfinite(norm) else None
        line |= _speed(values) | token_entries(values)
        for term, name in loss.reported_counts.items():
            line[name] = int(values["counted"][0][list(loss.terms).index(term)])
        line["skipped_updates"] = int(values["skips"][0][0])
        if places := values["places"][0]:
            line["packing_efficiency"] = round(float(values["tokens"][0] / places), 4)
        return line

    @property
    def skipped_in_a_row(self) -> int:
        """Current streak of skipped updates; reads from the device."""
        return int(self._skips[1].numpy())

    def _begin_window(self) -> None:
        self._sums, self._counts = paddle.zeros_like(self._sums), paddle.zeros_like(self._counts)
        total, streak, _ = self._skips
        self._skips = paddle.stack([total, streak, paddle.zeros_like(streak)])
        # Any: some are floats.
        self._window: Any = Counter()
        self._lengths: list[int] = []
        self._step_tokens: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        """State that a checkpoint stores; reads from the device."""
        tensors = (self._counted, self._skips, self._sums, self._counts)
        values: list[list[float]] = [tensor.numpy().tolist() for tensor in tensors]
        counted, skips, *window = values
        state = {"counted": counted, "skips": skips, "window": window}
        if not self._sources:
            return state
        # Apart from the terms, which all versions have.
        number = len(self._loss.terms)
        of_sources = [values[number:] for values in (counted, *window)]
        state |= {"counted": counted[:number], "window": [values[:number] for values in window]}
        return state | {"sources": {"names": self._sources, "values": of_sources}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; of one without these sources, as of an earlier version, the sums
        of the sources begin anew.

        Raises:
            ValueError: it is no state of this loss's terms.
        """
        saved = read_section(_MeterState, state, "meter")
        terms = len(self._loss.terms)
        sums, of_window = saved.window
        if not len(saved.counted) == len(sums) == len(of_window) == terms or min(of_window) < 0:
            raise ValueError(
                f"meter: counted is {shown(saved.counted)} and window {shown(saved.window)}; they "
                f"must have one number for each of {', '.join(self._loss.terms)}, counts of at "
                "least 0"
            )
        of_sources = [[0.0] * len(self._sources)] * 3
        if saved.sources is not None:
            stored = read_section(_SourceSums, saved.sources, "meter: sources")
            if any(len(each) != len(stored.names) for each in stored.values):
                raise ValueError(
                    f"meter: sources: values are {shown(stored.values)}; they must have a number "
                    f"for each of {', '.join(stored.names)}"
                )
            if stored.names == self._sources:
                of_sources = stored.values
        values = [
            [*one, *other]
            for one, other in zip((saved.counted, sums, of_window), of_sources, strict=True)
        ]
        self._counted, self._sums, self._counts, self._skips = (
            paddle.to_tensor(np.array(each, dtype=np.float64)) for each in (*values, saved.skips)
        )


@checked
class _Totals:
    """A state, see `SourceTotals.state_dict`."""

    names: list[str]
    tokens: list[Count]
    documents: list[Count]


class SourceTotals:
    """Counts of the whole run, the same on every rank; empty for data without sources.

    Args:
        data: the run's training data; of a mix it has `names` of the sources, and `documents` of
            each in an epoch.
    """

    def __init__(self, data: object):
        self._names = list(getattr(data, "names", ()))
        self._documents_in_epoch = list(getattr(data, "documents", ()))
        self._tokens, self._documents = ([0] * len(self._names) for _ in range(2))

    @property
    def passes(self) -> float | None:
        """Epochs of all sources together; None without sources."""
        total = sum(self._documents_in_epoch)
        return sum(self._documents) / total if total else None

    def add(self, tokens: Sequence[int], documents: Sequence[int]) -> None:
        """Add a step.

        Args:
            tokens, documents: `[S]` of all ranks; documents count in the step where they begin.
        """
        self._tokens = [a + b for a, b in zip(self._tokens, tokens, strict=True)]
        self._documents = [a + b for a, b in zip(self._documents, documents, strict=True)]

    def entries(self) -> dict[str, float]:
        """Entries of a metrics line."""
        line: dict[str, float] = {}
        for name, tokens, documents, in_epoch in zip(
            self._names, self._tokens, self._documents, self._documents_in_epoch, strict=True
        ):
            line[f"tokens/{name}"], line[f"documents/{name}"] = tokens, documents
            line[f"epochs/{name}"] = round(documents / in_epoch, 4)
        return line

    def state_dict(self) -> dict[str, Any]:
        """State that a checkpoint stores; JSON values."""
        return {"names": self._names, "tokens": self._tokens, "documents": self._documents}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state; None of a checkpoint without sources.

        Raises:
            ValueError: it is no state of these sources.
        """
        if state is None:
            return
        totals = read_section(_Totals, state, "sources")
        if totals.names != self._names or not (
            len(totals.tokens) == len(totals.documents) == len(self._names)
        ):
            raise ValueError(
                f"sources is {shown(dict(state))}; it must have a number of tokens and one of "
                f"documents of each of {self._names}"
            )
        self._tokens, self._documents = totals.tokens, totals.documents


def evaluation_entries(losses: MeanLosses) -> dict[str, float]:
    """Entries of a metrics line for an evaluation."""
    # Without losses, as of prompts alone, answers are scored.
    line = {"eval_loss": losses.loss} if any(losses.counts.values()) else {}
    line |= {f"eval_{name}": value for name, value in losses.measured.items()}
    has_terms = len(losses.terms) > 1
    if has_terms:
        line |= {f"eval_{name}": losses.terms[name] for name in losses.terms if losses.counts[name]}
    if losses.by_source and not has_terms:
        line["eval_perplexity"] = math.exp(losses.loss)
    for name, each in losses.by_source.items():
        line[f"eval_loss/{name}"] = each.loss
        if has_terms:
            of_group = {term: mean for term, mean in each.terms.items() if each.counts[term]}
            line |= {f"eval_{term}/{name}": mean for term, mean in of_group.items()}
        else:
            line[f"eval_perplexity/{name}"] = math.exp(each.loss)
    return line


def evaluation_keys(
    loss: Loss, sources: Iterable[str], measure: Measure | None, scores: Sequence[str]
) -> set[str]:
    """Keys that `evaluation_entries` may have in a run.

    Args:
        sources: of the evaluation data, or "".
        scores: of generated answers.
    """
    ones = dict.fromkeys(loss.terms, int(bool([*sources])))
    each = MeanLosses(1.0, dict(ones), ones)
    found = {} if measure is None else measure.entries(np.ones_like(measure.sums))
    measured = {**found, **dict.fromkeys(scores, 1.0)}
    by_source = {name: each for name in sources if name}
    return {*evaluation_entries(each._replace(by_source=by_source, measured=measured))}


def check_skipped(values: Values, line: dict[str, Any], limit: int, output_dir: Path) -> None:
    """Warn of updates that were skipped since the previous report.

    Args:
        line: the metrics line of the report.
        limit: train.max_nonfinite_steps.

    Raises:
        RuntimeError: `limit` updates in a row were skipped.
    """
    # Longest streak since the previous report.
    longest = int(values["skips"][0][2])
    if longest == 0:
        return
    logger.warning(
        "up to %d updates in a row were skipped since the last report, as a loss or the "
        "gradient norm was not finite; %d of the run so far",
        longest,
        line["skipped_updates"],
    )
    if longest < limit:
        return
    saved = complete_checkpoints(output_dir)
    raise RuntimeError(
        f"{longest} updates in a row were skipped up to step {line['step']}, as a loss or the "
        "gradient norm was not finite: train.max_nonfinite_steps is reached. "
        + (f"The last checkpoint is {saved[-1][1]}. " if saved else "")
        + "Look at the data of these steps, or lower train.learning_rate"
    )


def _speed(values: Values) -> dict[str, float]:
    seconds, steps = float(values["seconds"].max()), float(values["steps"][0])
    if not steps or not seconds:
        return {}
    amounts = {f"{unit}_per_second": float(values[unit][0]) for unit in ("samples", "tokens")}
    speed = {name: round(amount / seconds, 1) for name, amount in amounts.items() if amount}
    peak = float(values["peak_flops"].sum())
    if peak and (flops := float(values["flops"][values["counts_data"] > 0].sum())):
        speed["mfu"] = round(flops / (seconds * peak), 4)
    return speed | {
        "step_seconds": round(float(values["seconds"].mean()) / steps, 4),
        "step_seconds_max": round(seconds / steps, 4),
        "data_wait_seconds": round(float(values["data_wait"].max()) / steps, 4),
    }
