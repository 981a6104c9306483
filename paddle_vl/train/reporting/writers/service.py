"""What the writers of W&B and SwanLab share: a run that keeps its id, and what is told about it.

Their modes are chosen with the variables of the packages: WANDB_MODE=offline and
SWANLAB_MODE=offline write into the run's folder, for `wandb sync` and `swanlab sync`.
"""

import os
import secrets
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paddle_vl.files.text_file import write_text
from paddle_vl.train.reporting.answer_pictures import caption, drawn
from paddle_vl.train.reporting.run_files import Line
from paddle_vl.train.reporting.writers.base import Start, tagged

ID_FILE = "run_id"
PROJECT = "paddle-vl"
# Of an entry of run.json, what tells runs apart beside the settings.
_TOLD = (
    *("git", "paddle_vl_git", "versions", "command", "folder", "host"),
    *("device", "device_name", "num_processes", "hub"),
)


class ServiceRun(ABC):
    """A run of a service, whose package has its name.

    Steps that a resumed run repeats stay as they were written first.

    Args:
        init: starts its run, with `project`, `name`, `id`, `resume` and `config`.
        image: makes its image of a picture, with a `caption`.

    Raises:
        ValueError: the service does not start.
    """

    package: str

    def __init__(self, start: Start, init: Callable[..., Any], image: Callable[..., Any]):
        name, self._last_step, self._image = self.package, 0, image
        file = start.output_dir / name / ID_FILE
        if start.last_step > 0 and file.is_file():
            self._last_step = start.last_step
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, secrets.token_hex(8))
        told = {key: start.entry[key] for key in _TOLD if start.entry.get(key) is not None}
        variable = name.upper()
        # SwanLab takes Ctrl-C for itself in the main thread; a run saves a checkpoint at it.
        on_interrupt = signal.getsignal(signal.SIGINT)
        try:
            self.run = init(
                project=os.environ.get(f"{variable}_PROJECT", PROJECT),
                name=Path(start.output_dir).resolve().name,
                id=file.read_text(encoding="utf-8"),
                resume="allow",
                config={**start.entry.get("settings", {}), "start": told},
            )
        except Exception as error:
            raise ValueError(
                f"logging.report_to asks for {name}, which does not start a run ({error}): log in "
                f"with `{name} login`, or set {variable}_MODE=offline and sync the run later"
            ) from error
        if signal.getsignal(signal.SIGINT) is not on_interrupt:
            signal.signal(signal.SIGINT, on_interrupt)
        for line in start.lines:
            self.write(line)

    def write(self, line: Line) -> None:
        numbers = dict(tagged(line))
        if line["step"] > self._last_step and numbers:
            self.run.log(numbers, step=line["step"])

    def show(self, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        images = [
            self._image(drawn(source, line), caption=caption(line))
            for line in answers
            for source in line.get("images", ())[:1]
        ]
        if step > self._last_step and images:
            self.run.log({"eval/answers": images}, step=step)

    def close(self) -> None:
        # A run that fails closes its writers while it handles the error.
        self._finish(sys.exc_info()[1])

    @abstractmethod
    def _finish(self, error: BaseException | None) -> None:
        """Tell the service that the run is over, or has failed."""
