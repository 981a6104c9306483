"""Settings of a guard against forgetting, see `paddle_vl.train.guard`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from paddle_vl.config.section import Section

# Numbers of evaluations that are lower where a model is better.
LOWER_IS_BETTER = frozenset({"loss", "perplexity", "cer", "wer", "ned", "ned_letters", "formula"})


class GuardConfig(Section):
    """What a run may lose of the scores that it starts with."""

    metric: Annotated[str, Field(min_length=1)]
    """a number that evaluations give of each named source of data.eval, as in metrics.jsonl, with
    or without eval_: cer, teds, exact_match; of a pretraining mix also loss"""
    max_drop: Annotated[float, Field(ge=0)]
    """how much worse than before the first update it may be, in the metric's unit"""
    action: Literal["stop", "warn"] = "stop"
    """what a fall does: stop (end the run; final/ holds the model of the best evaluation before, or
    without train.best of the last one) or warn"""
    sources: list[str] = Field(default=[])
    """names of those that are guarded; default: all that have the metric"""
    mode: Literal["min", "max"] | None = None
    """whether lower or higher is better; default: min for losses, cer, wer, ned and formula, max
    for others"""

    @property
    def key(self) -> str:
        """The metric's key in metrics.jsonl, without a source."""
        return f"eval_{self.metric.removeprefix('eval_')}"

    def drop(self, before: float, now: float) -> float:
        """How much worse a number is."""
        is_lower = self.metric.removeprefix("eval_") in LOWER_IS_BETTER
        mode = self.mode or ("min" if is_lower else "max")
        return now - before if mode == "min" else before - now


# One, or a list of them.
Guards = Annotated[
    list[GuardConfig], BeforeValidator(lambda each: [each] if isinstance(each, dict) else each)
]
