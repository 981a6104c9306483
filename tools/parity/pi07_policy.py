"""The policy around pi07's model, and the planner."""

from parity.comparison import CaseReport
from parity.pi07_golden import GoldenCase


def run_normalize(case: GoldenCase, report: CaseReport) -> None:
    """Normalisation in all modes."""
    report.unsupported = "the policy's normalisation"


def run_policy(case: GoldenCase, report: CaseReport) -> None:
    """From raw batches to losses, and a rollout."""
    report.unsupported = "the policy"


def run_planner(case: GoldenCase, report: CaseReport) -> None:
    """The planner's losses and its greedy decoding."""
    report.unsupported = "the planner"
