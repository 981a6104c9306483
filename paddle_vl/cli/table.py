"""A command: a row with what it runs and its options, from which argparse's parser is made."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_LARGEST = 2**31 - 1


def positive(text: str) -> int:
    return _whole(text, 1)


def natural(text: str) -> int:
    return _whole(text, 0)


def port(text: str) -> int:
    """0 for any free one."""
    if (found := natural(text)) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port from 0 to 65535")
    return found


def seconds(text: str) -> float:
    """At least 0."""
    if not 0 <= (found := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds, 0 or more")
    return found


def _whole(text: str, least: int) -> int:
    found = int(text)
    if found < least:
        raise argparse.ArgumentTypeError(f"{text} is not at least {least}")
    if found > _LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:40]} is beyond {_LARGEST:,}")
    return found


class Option(NamedTuple):
    """An argument of a command.

    Attributes:
        names: as argparse takes them, separated by spaces.
        text: its help.
        settings: further arguments of argparse's `add_argument`.
        group: title of its group in the help.
    """

    names: str
    text: str
    settings: Mapping[str, Any]
    group: str | None = None


def value(names: str, metavar: str, text: str, **settings: Any) -> Option:
    return Option(names, text, {"metavar": metavar, **settings})


def number(names: str, text: str, default: int | None = None) -> Option:
    """A whole number from 1."""
    return value(names, "N", text, type=positive, default=default)


def switch(name: str, text: str) -> Option:
    return Option(name, text, {"action": "store_true"})


def grouped(title: str, *options: Option) -> list[Option]:
    return [option._replace(group=title) for option in options]


def refuse_given(options: argparse.Namespace, rows: Sequence[Option], reason: str) -> None:
    """Refuse options that nothing would read.

    Raises:
        ValueError: some of them differ from their defaults; the message begins with the reason.
    """
    given = []
    for names, _, settings, _ in rows:
        default = settings.get("default", False if "action" in settings else None)
        if getattr(options, names.removeprefix("--").replace("-", "_")) != default:
            given.append(names)
    if given:
        raise ValueError(f"{reason}: leave {', '.join(given)} out")


class Parser(argparse.ArgumentParser):
    """A parser whose epilog may be a function."""

    def format_help(self) -> str:
        if callable(self.epilog):
            self.epilog = self.epilog()
        return super().format_help()


class Command(NamedTuple):
    """A command, under the name of the function that runs it.

    Attributes:
        run: returns the exit code.
        groups: what the help says of a group of options, by its title.
        epilog: the end of the help; a function is called when it is shown.
        folders: options that are required, and may be given in this order without their names.
        one_of: options of which exactly one is required.
    """

    run: Callable[[argparse.Namespace], int]
    summary: str
    description: str
    epilog: str | Callable[[], str]
    options: Sequence[Option]
    groups: Mapping[str, str] = {}
    folders: Sequence[str] = ()
    one_of: Sequence[str] = ()

    def add_to(self, subparsers: argparse._SubParsersAction) -> None:
        parser = subparsers.add_parser(
            self.run.__name__.replace("_", "-"),
            help=self.summary,
            description=self.description,
            epilog=self.epilog,  # pyright: ignore[reportArgumentType]
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.set_defaults(run=self.run, folders=self.folders)
        places: dict[str | None, Any] = {None: parser}
        if self.one_of:
            chosen = parser.add_mutually_exclusive_group(required=True)
        for names, text, settings, group in self.options:
            if group not in places:
                places[group] = parser.add_argument_group(group, self.groups.get(str(group)))
            place = chosen if names in self.one_of else places[group]
            place.add_argument(*names.split(), help=text, **settings)


# The arguments of a run.
CONFIG = value("config", "CONFIG", "YAML file with the run's settings")
OVERRIDES = value(
    "overrides",
    "section.name=value",
    "setting that overrides the file's; the value in YAML",
    nargs="*",
)


def _variables(text: str) -> dict[str, Any]:
    from paddle_vl.config.bounded_yaml import read_document

    try:
        found, _ = read_document(text, "the option")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not isinstance(found, dict):
        example = "'{enable_thinking: false}'"
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no mapping like {example}")
    return found


TEMPLATE = value(
    "--chat-template-kwargs",
    "MAPPING",
    "variables of the chat template, in YAML: '{enable_thinking: false}'",
    type=_variables,
    default={},
)
BASE = value("--base", "DIR", "base model of adapters (default: the folder or name in their files)")
# Of commands that read data files.
CACHE = value("--cache", "DIR", "folder for indexes and copies (default: beside the data)")
SKIP_BAD = switch(
    "--skip-bad", "leave rows out that cannot be used, and count them (default: stop)"
)
MAX_LINE = number("--max-line-bytes", "longest line of a text file (default 1048576)", 1 << 20)
MODEL_TEXT = (
    "a model folder (config.json, weights, processor files), a folder of adapters in PEFT's "
    "format, a run's output_dir: its final model, or its newest checkpoint while there is none; or "
    "org/name on a hub"
)


def model(text: str = MODEL_TEXT) -> Option:
    return _folder("--model", text)


def output(text: str) -> Option:
    return _folder("--output", text)


def _folder(names: str, text: str) -> Option:
    return value(names, "DIR", f"{text}; the option's name may be left out")
