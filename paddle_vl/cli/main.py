"""`paddle-vl`: parse the command line, run one subcommand, and report its errors.

Nothing heavy is imported before a subcommand runs, so that `--help` answers at once.
"""

import argparse
import logging
import os
import sys
import textwrap
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from paddle_vl.cli import commands
from paddle_vl.cli.doctor import add_doctor
from paddle_vl.cli.export import add_export
from paddle_vl.cli.heap import restart_with_whole_blocks
from paddle_vl.cli.opentau_words import translated
from paddle_vl.cli.profile import add_profile
from paddle_vl.cli.tokenize import add_tokenize
from paddle_vl.cli.train import add_report, add_train
from paddle_vl.parallel.launcher import RANK_LOG_VARIABLE

logger = logging.getLogger("paddle_vl")
DEBUG_VARIABLE = "PADDLE_VL_DEBUG"
PACKAGE = Path(__file__).resolve().parents[1]
INTERRUPTED = 130


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `main` and end the process with its exit code."""
    if arguments is None and sys.argv[1:2] in (["train"], ["profile"]):
        restart_with_whole_blocks()
    is_distributed = int(os.environ.get("PADDLE_TRAINERS_NUM", "1")) > 1
    try:
        code = main(arguments)
    except Exception:
        # Write the traceback to the rank's log too.
        if rank_log := os.environ.get(RANK_LOG_VARIABLE):
            with open(rank_log, "a", encoding="utf-8") as stream:
                traceback.print_exc(file=stream)
        if not is_distributed:
            raise
        traceback.print_exc()
        code = 1
    if is_distributed:
        # All work is done and written. Skip the teardown of Paddle's communication threads: other
        # ranks end at other times, an abort there would look like a failed run, and NCCL may wait
        # for a rank that has failed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns:
        The exit code: 0; 1 for an error in settings, data or files; 128 + signal number for a
        training that was asked to stop and saved a checkpoint. argparse exits with 2 on wrong
        arguments.
    """
    options = _parse(build_parser(), arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    if rank_log := os.environ.get(RANK_LOG_VARIABLE):
        # Rank 0 has the terminal and, like every rank, a log file. Messages may quote file names
        # that are not UTF-8.
        handler = logging.FileHandler(
            rank_log, mode="w", encoding="utf-8", errors="backslashreplace"
        )
        logging.getLogger().addHandler(handler)
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    # A warning of every import of Paddle; nothing is compiled here.
    warnings.filterwarnings("ignore", message="No ccache found")
    # A warning of fleet for every process group that a rank is not in.
    warnings.filterwarnings("ignore", message="Current global rank")
    try:
        return options.run(options)
    except KeyboardInterrupt:
        logger.error("interrupted")
        return INTERRUPTED
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get(DEBUG_VARIABLE) == "1" or not _is_meant_for_users(error):
            raise
        logger.error("error: %s", error)
        return 1


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse with `section.name=value` anywhere: argparse alone takes them only side by side.

    The profiler takes OpenTau's options too.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["profile"]:
        try:
            arguments = ["profile", *translated(arguments[1:])]
        except ValueError as error:
            parser.error(str(error))
    options, rest = parser.parse_known_args(arguments)
    is_setting = [not text.startswith("-") and "=" in text for text in rest]
    if rest and not (hasattr(options, "overrides") and all(is_setting)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


def _is_meant_for_users(error: Exception) -> bool:
    """Whether the message suffices: an OSError, or an error that this package raised.

    An error from another package is a bug here and needs its traceback.
    """
    if isinstance(error, OSError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(PACKAGE)


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="paddle-vl",
        description="Train, evaluate and run Qwen3-VL and pi07 models with PaddlePaddle.",
        epilog=textwrap.dedent(f"""\
            examples:
              paddle-vl train configs/my_run.yaml train.learning_rate=1e-4
              paddle-vl evaluate runs/my_run --data data/test.jsonl
              paddle-vl generate --model runs/my_run --image cat.png --prompt "What is this?"
              paddle-vl report runs/my_run

            `paddle-vl COMMAND --help` explains each. {DEBUG_VARIABLE}=1 shows the traceback of an
            error."""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    add_train(subparsers)
    commands.add_evaluate(subparsers)
    commands.add_generate(subparsers)
    commands.add_merge(subparsers)
    add_export(subparsers)
    add_profile(subparsers)
    add_report(subparsers)
    add_tokenize(subparsers)
    add_doctor(subparsers)
    return parser
