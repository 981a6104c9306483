"""VisualDL's and TensorBoard's files of events, which have the same calls."""

from typing import Any

from paddle_vl.train.reporting.run_files import Line
from paddle_vl.train.reporting.writers.base import Start, tagged


class EventFiles:
    """Writes with a LogWriter or SummaryWriter into its own folder of a run.

    Attributes:
        name: of the folder.
        pattern: of its files. They are replaced at the start, as neither format can remove the
            steps that a resumed run repeats.
    """

    name: str
    pattern: str

    def __init__(self, writer_class: Any, start: Start, **settings: Any):
        folder = start.output_dir / self.name
        for file in folder.glob(self.pattern):
            file.unlink()
        self._writer = writer_class(logdir=str(folder), **settings)
        for line in start.lines:
            self._add(line)
        self._writer.flush()

    def _add(self, line: Line) -> None:
        for tag, value in tagged(line):
            self._writer.add_scalar(tag, value, line["step"])

    def write(self, line: Line) -> None:
        self._add(line)
        self._writer.flush()

    def show(self, step: int, answers: Any) -> None:
        """predictions.jsonl has them."""

    def close(self) -> None:
        self._writer.close()
