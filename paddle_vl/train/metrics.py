"""What a run reports about itself: one JSON object a line in metrics.jsonl.

Keys of a line: `step`; `epoch`, passes over the training data so far; `loss`, mean cross entropy
over the target tokens since the last line (null when every update was skipped); `learning_rate` and
`grad_norm` (before clipping, null if not finite) of the last step; `tokens_per_second` of training
alone; `packing_efficiency` with data.packing, the share of real tokens in rows since the last line
or start; `target_tokens`, `skipped_updates` and `skipped_samples` of the whole run so far;
`eval_loss` in steps that evaluate; `learning_rate/PART`, for each of train.part_learning_rates, as
`learning_rate`; with experts, `tokens_per_expert_min`, `_mean` and `_max`, see
`paddle_vl.train.expert_load`. With the load-balancing loss (`output_router_logits` of the model's
configuration) `loss` includes it, `eval_loss` does not. A line of an evaluation between two reports
has `step` and `eval_loss` only.
"""

import json
import math
from pathlib import Path
from typing import Any

from paddle_vl.train.step import StepResult

METRICS_FILE = "metrics.jsonl"


class StepMeter:
    """Collects step results between two reports, and counts over the whole run."""

    def __init__(self):
        self.target_tokens = 0
        self.skipped_updates = 0
        self._window = {"loss_sum": 0.0, "targets": 0}
        self._tokens, self._places, self._seconds = 0, 0, 0.0
        self._grad_norm = math.nan

    def add(self, result: StepResult, seconds: float) -> None:
        """Count one step that took `seconds`."""
        self.skipped_updates += result.is_skipped
        self._tokens += result.num_tokens
        self._places += result.num_packed_places
        self._seconds += seconds
        self._grad_norm = result.grad_norm
        if not result.is_skipped:
            self.target_tokens += result.num_target_tokens
            self._window["loss_sum"] += result.loss * result.num_target_tokens
            self._window["targets"] += result.num_target_tokens

    def tokens_per_second(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    def mean_loss(self) -> float | None:
        """Since the last report; None before the first update."""
        targets = self._window["targets"]
        return self._window["loss_sum"] / targets if targets else None

    def report(self) -> dict[str, Any]:
        """The window's part of a metrics line; a new window begins."""
        line = {
            "loss": self.mean_loss(),
            "grad_norm": self._grad_norm if math.isfinite(self._grad_norm) else None,
            "tokens_per_second": round(self.tokens_per_second(), 1),
            "target_tokens": self.target_tokens,
            "skipped_updates": self.skipped_updates,
        }
        if self._places:
            line["packing_efficiency"] = round(self._tokens / self._places, 4)
        self._window = {"loss_sum": 0.0, "targets": 0}
        self._tokens, self._places, self._seconds = 0, 0, 0.0
        return line

    def state_dict(self) -> dict[str, Any]:
        return {
            "target_tokens": self.target_tokens,
            "skipped_updates": self.skipped_updates,
            "window": dict(self._window),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.target_tokens = state["target_tokens"]
        self.skipped_updates = state["skipped_updates"]
        self._window = dict(state["window"])


class MetricsFile:
    """Appends lines to a metrics.jsonl."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, allow_nan=False) + "\n")

    def drop_after(self, step: int) -> None:
        """Forget lines of later steps than the one that a run continues from."""
        kept = [line for line in self.read() if line["step"] <= step]
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        partial.replace(self.path)

    def read(self) -> list[dict[str, Any]]:
        """All lines; one that a crash cut short at the end is left out.

        Raises:
            RuntimeError: a line in the middle is not JSON.
        """
        if not self.path.exists():
            return []
        texts = self.path.read_text(encoding="utf-8").splitlines()
        lines = []
        for number, text in enumerate(texts, start=1):
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError as error:
                if number < len(texts):
                    raise RuntimeError(
                        f"{self.path}:{number} is not a metrics line ({error}); mend or remove it"
                    ) from error
        return lines
