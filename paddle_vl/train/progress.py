"""The progress bar of a run: step, time left, loss, learning rate and speed."""

import sys
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm


class ProgressBar:
    """A bar on stderr; in a file or pipe a line every half minute.

    Args:
        is_shown: False shows nothing.
    """

    def __init__(self, num_steps: int, first_step: int, is_shown: bool):
        self._bar = tqdm(
            total=num_steps,
            initial=first_step,
            desc="train",
            unit="step",
            disable=not is_shown,
            dynamic_ncols=True,
            mininterval=0.2 if sys.stderr.isatty() else 30.0,
        )

    def advance(self) -> None:
        """One step further."""
        self._bar.update()

    def show(self, line: Mapping[str, Any]) -> None:
        """Show the last known loss, rate and speed.

        Args:
            line: of the metrics, see `paddle_vl.train.metrics`.
        """
        parts = [
            f"{label} {line[name]:{form}}"
            for label, name, form in (("loss", "loss", ".4f"), ("lr", "learning_rate", ".2e"))
            if line.get(name) is not None
        ]
        for unit in ("tokens", "samples"):
            if (amount := line.get(f"{unit}_per_second")) is not None:
                parts.append(f"{amount:.0f}" if amount >= 100 else f"{amount:.3g}")
                parts[-1] += f" {unit}/s"
                break
        if parts:
            self._bar.set_postfix_str(", ".join(parts), refresh=False)

    def close(self) -> None:
        self._bar.close()
