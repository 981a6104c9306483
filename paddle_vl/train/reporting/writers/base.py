"""What a writer of a run's numbers is, and how the writers of a run are opened.

The module NAME of this folder is the writer `NAME` of logging.report_to, and has a class `Writer`.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from paddle_vl.train.reporting.run_files import Line, numbers_of, tag_of


class Start(NamedTuple):
    """What a writer is told when a run starts or goes on.

    Attributes:
        output_dir: of the run; its name is the run's.
        entry: newest entry of run.json, with settings, git state and versions.
        lines: of the run so far.
        last_step: newest step that was ever written, also one that the run repeats now; 0 for a new
            run.
    """

    output_dir: Path
    entry: Mapping[str, Any] = MappingProxyType({})
    lines: Sequence[Line] = ()
    last_step: int = 0


class Writer(Protocol):
    """Writes every number of a run's metrics lines; used by rank 0 only.

    Attributes:
        package: name of the module that it needs, which is imported when a writer is made.
    """

    package: str

    def __init__(self, start: Start):
        """Write `start.lines` too, each step once though a run repeats steps.

        Raises:
            ValueError: the program's service refuses the run.
        """

    def write(self, line: Line) -> None:
        """Write a line; a reader sees it within a second."""

    def show(self, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Show lines of predictions.jsonl with their pictures, where the program has these."""

    def close(self) -> None:
        """Finish; nothing is lost after it."""


def open_writers(names: Sequence[str], start: Start) -> list[Writer]:
    """The writers of logging.report_to.

    Raises:
        ValueError: the package of a writer is not installed, or see `Writer`.
    """
    classes = [import_module(f"{__package__}.{name}").Writer for name in names]
    # Nothing is written or removed unless all are there.
    for name, writer in zip(names, classes, strict=True):
        try:
            import_module(writer.package)
        except ImportError as error:
            raise ValueError(
                f"logging.report_to asks for {name}, which cannot be imported ({error}): "
                f"pip install 'paddle-vl[{name}]', or take it out of logging.report_to"
            ) from error
    return [writer(start) for writer in classes]


def tagged(line: Line) -> Iterator[tuple[str, float]]:
    """The finite numbers of a line, under grouped names."""
    return ((tag_of(key), value) for key, value in numbers_of(line) if value is not None)
