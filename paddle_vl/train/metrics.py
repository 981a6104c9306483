"""What a run reports about itself: one JSON object a line in metrics.jsonl.

Keys of a line: `step`; `epoch`, passes over the training data so far; `loss`, mean cross entropy
over the target tokens since the last line (null when every update was skipped), of a policy the
weighted sum of `MSE` and `CE`, which stand beside it; `learning_rate` and `grad_norm` (before
clipping, null if not finite) of the last step; `samples_per_second` and `tokens_per_second` of
training alone; `packing_efficiency` with data.packing, the share of real tokens in rows since the
last line or start; `target_tokens`, `skipped_updates` and `skipped_samples` of the whole run so
far; `eval_loss` in steps that evaluate, of a policy with its terms; `learning_rate/PART`, for each
of train.part_learning_rates, as `learning_rate`; with experts, `tokens_per_expert_min`, `_mean` and
`_max`, see `paddle_vl.train.expert_load`. With the load-balancing loss (`output_router_logits` of
the model's configuration) `loss` includes it, `eval_loss` does not. A line of an evaluation between
two reports has `step` and the evaluation's entries only.
"""

import math
from typing import Any

from paddle_vl.train.objective import LANGUAGE, Objective, weighted
from paddle_vl.train.step import StepResult


class StepMeter:
    """Collects step results between two reports, and counts over the whole run."""

    def __init__(self, objective: Objective = LANGUAGE):
        self._objective = objective
        # What the run has counted of each term; the window is what came since the last report.
        self._counted = dict.fromkeys(objective.terms, 0)
        self.skipped_updates = 0
        self._begin_window()
        self._grad_norm = math.nan

    def add(self, result: StepResult, seconds: float) -> None:
        """Count one step that took `seconds`."""
        self.skipped_updates += result.is_skipped
        self._samples += result.num_samples
        self._tokens += result.num_tokens
        self._places += result.num_packed_places
        self._seconds += seconds
        self._grad_norm = result.grad_norm
        if result.is_skipped:
            return
        for name, count in result.counts.items():
            self._counted[name] += count
            window = self._window[name]
            self._window[name] = [window[0] + result.terms[name] * count, window[1] + count]

    def speed(self) -> dict[str, float]:
        """Samples, and tokens where they are counted, per second since the last report."""
        amounts = {"samples_per_second": self._samples, "tokens_per_second": self._tokens}
        return {
            name: round(amount / self._seconds, 1) if self._seconds else 0.0
            for name, amount in amounts.items()
            if amount
        }

    def mean_terms(self) -> dict[str, float] | None:
        """Since the last report; None before the first update."""
        if not all(count for _, count in self._window.values()):
            return None
        return {name: value / count for name, (value, count) in self._window.items()}

    def report(self) -> dict[str, Any]:
        """The window's part of a metrics line; a new window begins."""
        terms = self.mean_terms()
        line = {"loss": None if terms is None else weighted([*terms.values()], self._objective)}
        if len(self._objective.terms) > 1:
            line |= dict.fromkeys(self._objective.terms) if terms is None else terms
        line |= {
            "grad_norm": self._grad_norm if math.isfinite(self._grad_norm) else None,
            **self.speed(),
        }
        line |= {
            name: self._counted[term] for term, name in self._objective.reported_counts.items()
        }
        line["skipped_updates"] = self.skipped_updates
        if self._places:
            line["packing_efficiency"] = round(self._tokens / self._places, 4)
        self._begin_window()
        return line

    def _begin_window(self) -> None:
        self._window: dict[str, list[float]] = {name: [0.0, 0] for name in self._objective.terms}
        self._samples, self._tokens, self._places, self._seconds = 0, 0, 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "counted": dict(self._counted),
            "skipped_updates": self.skipped_updates,
            "window": {name: list(values) for name, values in self._window.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counted = dict(state["counted"])
        self.skipped_updates = state["skipped_updates"]
        self._window = {name: list(values) for name, values in state["window"].items()}
