"""Curves in VisualDL and TensorBoard, for whoever asks for them in logging.report_to."""

from pathlib import Path
from typing import Any


class ScalarWriters:
    """Passes every number of a metrics line on to the writers.

    Args:
        names: of logging.report_to; each writes into its own folder in `output_dir`.

    Raises:
        ValueError: a writer's package is not installed.
    """

    def __init__(self, names: list[str], output_dir: Path):
        self._writers = [_OPEN[name](str(output_dir / name)) for name in names]

    def write(self, line: dict[str, Any]) -> None:
        for name, value in line.items():
            if name != "step" and value is not None:
                for writer in self._writers:
                    writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def _open_visualdl(folder: str) -> Any:
    try:
        from visualdl import LogWriter
    except ImportError as error:
        raise ValueError(_not_installed("visualdl", error)) from error
    return LogWriter(logdir=folder)


def _open_tensorboard(folder: str) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ValueError(_not_installed("tensorboard", error)) from error
    return SummaryWriter(logdir=folder)


def _not_installed(name: str, error: ImportError) -> str:
    return (
        f"logging.report_to asks for {name}, which cannot be imported ({error}): "
        f"pip install 'paddle-vl[{name}]', or take it out of logging.report_to"
    )


_OPEN = {"visualdl": _open_visualdl, "tensorboard": _open_tensorboard}
