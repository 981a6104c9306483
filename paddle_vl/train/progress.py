"""The progress bar of a run: step, time left, loss, learning rate and speed."""

import sys
from collections.abc import Mapping

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

    def advance(self, loss: float, learning_rate: float, speed: Mapping[str, float]) -> None:
        """One step further.

        Args:
            speed: by what is counted, `tokens_per_second`; the last of them is shown.
        """
        text = f"loss {loss:.4f}, lr {learning_rate:.2e}"
        if speed:
            unit, amount = list(speed.items())[-1]
            shown = f"{amount:.0f}" if amount >= 100 else f"{amount:.3g}"
            text += f", {shown} {unit.removesuffix('_per_second')}/s"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()
