"""Curves in VisualDL and TensorBoard, for whoever asks for them in logging.report_to."""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from paddle_vl.train.reporting.metric_groups import tag_of
from paddle_vl.train.reporting.metrics_file import Line, numbers_of


class _Kind(NamedTuple):
    """Where a writer comes from, the files that it writes, and settings of it."""

    module: str
    writer: str
    files: str
    settings: dict[str, Any]


_KINDS = {
    "visualdl": _Kind("visualdl", "LogWriter", "vdlrecords.*", {}),
    # Its `flush` does not wait for what is still in its queue.
    "tensorboard": _Kind(
        "tensorboardX", "SummaryWriter", "events.out.tfevents.*", {"flush_secs": 1}
    ),
}


class ScalarWriters:
    """Passes every number of a metrics line on to the writers.

    Args:
        names: of logging.report_to; each writes into its own folder in `output_dir`.
        lines: those that the run has behind it. They take the place of whatever the writers wrote
            before: neither format can take back the steps that a resumed run repeats.

    Raises:
        ValueError: a writer's package is not installed.
    """

    def __init__(self, names: Sequence[str], output_dir: Path, lines: Iterable[Line] = ()):
        # All of them are there before anything is removed.
        writers = {name: _writer_class(name) for name in names}
        self._writers = []
        for name, writer in writers.items():
            kind, folder = _KINDS[name], output_dir / name
            for file in folder.glob(kind.files):
                file.unlink()
            self._writers.append(writer(logdir=str(folder), **kind.settings))
        for line in lines:
            self._add(line)
        self._flush()

    def write(self, line: Line) -> None:
        """Write a line; a reader finds it within a second."""
        self._add(line)
        self._flush()

    def _add(self, line: Line) -> None:
        for key, value in numbers_of(line):
            if value is not None:
                for writer in self._writers:
                    writer.add_scalar(tag_of(key), value, line["step"])

    def _flush(self) -> None:
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def _writer_class(name: str) -> Callable[..., Any]:
    kind = _KINDS[name]
    try:
        return getattr(import_module(kind.module), kind.writer)
    except ImportError as error:
        raise ValueError(
            f"logging.report_to asks for {name}, which cannot be imported ({error}): "
            f"pip install 'paddle-vl[{name}]', or take it out of logging.report_to"
        ) from error
