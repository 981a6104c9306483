"""`paddle-vl`: parse the command line, run one subcommand, and report its errors.

Nothing heavy is imported before a subcommand runs, so that `--help` answers at once.
"""

import argparse
import logging
import os
import platform
import re
import shlex
import sys
import textwrap
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import paddle_vl
from paddle_vl.cli.chat import CHAT
from paddle_vl.cli.commands import EVALUATE, GENERATE, MERGE
from paddle_vl.cli.data import (
    COMPUTE_STATS,
    CONVERT_DATA,
    PRECOMPUTE,
    SHOW_DATA,
    TOKENIZE,
)
from paddle_vl.cli.doctor import DOCTOR
from paddle_vl.cli.export import CHECK_FOLDER, EXPORT
from paddle_vl.cli.hubs import DOWNLOAD, UPLOAD
from paddle_vl.cli.opentau_words import translated, words_of_variables
from paddle_vl.cli.profile import PROFILE
from paddle_vl.cli.serve import SERVE, SERVE_POLICY
from paddle_vl.cli.table import Parser
from paddle_vl.cli.train import REPORT, TRAIN
from paddle_vl.parallel.launcher import LAUNCHER_VARIABLE, RANK_LOG_VARIABLE
from paddle_vl.processes import in_one_line

logger = logging.getLogger("paddle_vl")
DEBUG_VARIABLE = "PADDLE_VL_DEBUG"
PACKAGE = Path(__file__).resolve().parents[1]
INTERRUPTED = 130
MALLOC_VARIABLE, _CACHED_BLOCKS = "GLIBC_TUNABLES", "glibc.malloc.tcache_count"
# Modules of Paddle and of what it imports, whose warnings concern Paddle's own code.
_NOISY = r"(paddle|paddle2onnx|pkg_resources|setuptools|gast|astor|visualdl)(\.|$)"
# How Paddle's C++ begins a message.
_OF_PADDLE = re.compile(r"\s*(\([A-Z]\w+\) |-+\s+C\+\+ Traceback)")
COMMANDS = (
    TRAIN, EVALUATE, GENERATE, CHAT, MERGE, EXPORT, SERVE, SERVE_POLICY, PROFILE, REPORT, TOKENIZE,
    SHOW_DATA, CONVERT_DATA, COMPUTE_STATS, PRECOMPUTE, DOWNLOAD, UPLOAD, CHECK_FOLDER, DOCTOR,
)  # fmt: skip


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `main` and end the process with its exit code."""
    if arguments is None and sys.argv[1:2] in (["train"], ["profile"]):
        _restart_with_whole_blocks()
    is_distributed = int(os.environ.get("PADDLE_TRAINERS_NUM", "1")) > 1
    try:
        code = main(arguments)
    except Exception as error:
        if not _is_rank():
            raise
        _write_last_words(error, has_traceback=True)
        code = 1
    if is_distributed:
        # All work is done and written. Skip the teardown of Paddle's communication threads: other
        # ranks end at other times, an abort there would look like a failed run, and NCCL may wait
        # for a rank that has failed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _is_rank() -> bool:
    """Whether a launcher started this process, this package's or another."""
    return LAUNCHER_VARIABLE in os.environ or int(os.environ.get("PADDLE_TRAINERS_NUM", "1")) > 1


def _write_last_words(error: Exception, has_traceback: bool = False) -> None:
    """Write to a rank's log why it fails, in one last line, which launchers show."""
    text = " ".join(str(error).split()) if _is_meant_for_users(error) else in_one_line(error)
    line = f"error: {text}"
    if LAUNCHER_VARIABLE not in os.environ:
        # The last lines of the rank that failed first are the last that fleetrun shows.
        rank = os.environ.get("PADDLE_TRAINER_ID", "0")
        folder = os.environ.get("PADDLE_LOG_DIR", "the launcher's --log_dir")
        line = f"rank {rank} failed: {text}; its log is {folder}/workerlog.{rank}"
    # Rank 0 of this package's launcher has the terminal; the output of others is their log.
    log, own = os.environ.get(RANK_LOG_VARIABLE), nullcontext(sys.stderr)
    with open(log, "a", encoding="utf-8", errors="backslashreplace") if log else own as stream:
        if has_traceback:
            traceback.print_exception(error, file=stream)
        print(line, file=stream)


def with_whole_blocks(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process whose malloc joins all free blocks; a user's choice stays.

    Paddle asks glibc's malloc for every tensor of a CPU, aligned to pages. What is cut off before
    an aligned block goes to a cache of small blocks per thread, and does not join its neighbours
    again: the next tensor of that size does not fit into the hole. Without the caches a run needs 5
    to 10 % less memory. mallopt(3) does not know the setting; malloc reads it before any code runs.
    """
    given = environment.get(MALLOC_VARIABLE, "")
    if _CACHED_BLOCKS in given:
        return dict(environment)
    tunables = ":".join(filter(None, (given, f"{_CACHED_BLOCKS}=0")))
    return {**environment, MALLOC_VARIABLE: tunables}


def _restart_with_whole_blocks() -> None:
    """Start this process again, under the same number, with `with_whole_blocks`.

    Only for the wheel of Paddle without a GPU, and not in a debugger.
    """
    environment = with_whole_blocks(os.environ)
    is_debugged = sys.gettrace() is not None or sys.flags.interactive
    if environment == dict(os.environ) or is_debugged or platform.libc_ver()[0] != "glibc":
        return
    from importlib import metadata

    # If it fails, the run needs more memory, and is the same.
    with suppress(metadata.PackageNotFoundError, OSError):
        metadata.version("paddlepaddle")
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Returns:
        The exit code: 0; 1 for an error in settings, data or files; 128 + signal number for a
        training that was asked to stop and saved a checkpoint. argparse exits with 2 on wrong
        arguments.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    options = _parse(build_parser(), arguments)
    if rank_log := os.environ.get(RANK_LOG_VARIABLE):
        # Rank 0 has the terminal and, like every rank, a log file. Messages may quote file names
        # that are not UTF-8.
        handler = logging.FileHandler(
            rank_log, mode="w", encoding="utf-8", errors="backslashreplace"
        )
        logging.getLogger().addHandler(handler)
    for name in ("matplotlib", "httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    _silence_paddle()
    try:
        return options.run(options)
    except KeyboardInterrupt:
        logger.error("interrupted")
        return INTERRUPTED
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get(DEBUG_VARIABLE) == "1" or not _is_meant_for_users(error):
            raise
        if _is_rank():
            _write_last_words(error)
        else:
            logger.error("error: %s", error)
        return 1


def _silence_paddle() -> None:
    """Hide warnings of Paddle about itself, which no user of a command can act on.

    Call it before Paddle is imported. GLOG_minloglevel brings those of its C++ code back.
    """
    warnings.filterwarnings("ignore", module=_NOISY)
    os.environ.setdefault("GLOG_minloglevel", "2")  # Errors.


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse with settings (`section.name=value`) and folders anywhere.

    argparse alone takes settings only side by side, and a folder with or without its option's name
    only in some places. The profiler takes OpenTau's options and variables too.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["profile"]:
        try:
            arguments = ["profile", *words_of_variables(), *translated(arguments[1:])]
        except ValueError as error:
            parser.error(str(error))
    options, rest = parser.parse_known_args(arguments)
    unknown = [text for text in rest if text.startswith("-")]
    for name in options.folders:
        if getattr(options, name) is None and not unknown:
            if not rest:
                parser.error(f"{arguments[0]}: the following arguments are required: --{name}")
            setattr(options, name, rest.pop(0))
    if hasattr(options, "overrides"):
        if unknown:
            parser.error(_explained(unknown[0], arguments))
        options.overrides += [text for text in rest if "=" in text]
        rest = [text for text in rest if "=" not in text]
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def _explained(option: str, arguments: Sequence[str]) -> str:
    """How to write an option that is a setting, of this package or of another trainer."""
    from paddle_vl.config.family_settings import settings_help
    from paddle_vl.config.peer_names import setting_for

    name, equals, value = option.lstrip("-").partition("=")
    following = dict(pairwise(arguments)).get(option, "-")
    if not equals and not following.startswith("-"):
        value, option = following, f"{option} {following}"
    settings = [name for _, _, described in settings_help() for name in described]
    setting = setting_for(name, settings)
    if setting is None:
        return f"unrecognized argument {option}: settings are section.name=value, see --help"
    written = setting if "=" in setting else f"{setting}={shlex.quote(value) or 'VALUE'}"
    return f"unrecognized argument {option}: settings have no dashes; write {written}"


def _is_meant_for_users(error: Exception) -> bool:
    """Whether the message suffices: an OSError, or an error that this package raised.

    An error from another package is a bug here and needs its traceback; Paddle's C++ raises OSError
    too.
    """
    if _OF_PADDLE.match(str(error)):
        return False
    if isinstance(error, OSError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(PACKAGE)


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    parser = Parser(
        prog="paddle-vl",
        description="Train, evaluate and run models with PaddlePaddle: Qwen3-VL, Qwen3.5, "
        "Qwen4-Exp, PaddleOCR-VL and pi07.",
        epilog=textwrap.dedent(f"""\
            examples:
              paddle-vl train configs/my_run.yaml train.learning_rate=1e-4
              paddle-vl evaluate --model runs/my_run --data data/test.jsonl
              paddle-vl generate --model runs/my_run --image cat.png --prompt "What is this?"
              paddle-vl report runs/my_run

            `paddle-vl COMMAND --help` explains each. {DEBUG_VARIABLE}=1 shows the traceback of an
            error."""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"paddle-vl {paddle_vl.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print it and end")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_to(subparsers)
    return parser
