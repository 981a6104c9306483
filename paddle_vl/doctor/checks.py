"""All checks, in the order in which they run."""

from paddle_vl.doctor import (
    attention,
    copies,
    environment,
    generation,
    golden,
    kernels,
    precision,
    ranks,
    saving,
    simulated,
    steps,
    true_width,
)
from paddle_vl.doctor.check import Check, Machine

PARTS = (
    environment,
    precision,
    kernels,
    attention,
    copies,
    steps,
    true_width,
    golden,
    generation,
    saving,
    simulated,
    ranks,
)


def all_checks(machine: Machine) -> list[Check]:
    """Every check for this machine; some are skipped there, with a reason."""
    return [check for part in PARTS for check in part.checks(machine)]
