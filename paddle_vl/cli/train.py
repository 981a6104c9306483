"""`paddle-vl train`: its arguments, its help, and the call into the package."""

import argparse
import textwrap
from pathlib import Path
from typing import Any

from paddle_vl.cli.commands import add_run, configure_runtime, positive
from paddle_vl.parallel.launcher import launch


def add_train(subparsers: argparse._SubParsersAction) -> None:
    """`paddle-vl train CONFIG [section.name=value ...]`"""
    parser = subparsers.add_parser(
        "train",
        help="train a model as a YAML file says",
        description="Train a model as a YAML file says.",
        epilog=_train_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run(
        parser,
        "start N ranks on this machine (default 1); parallel.*_degree must multiply to N. fleetrun "
        "starts them on several machines",
    )
    parser.add_argument(
        "--max_restarts",
        "--max-restarts",
        type=natural,
        default=0,
        metavar="N",
        help="when a rank dies in training, start again from the last good checkpoint, up to N "
        "times (default 0)",
    )
    parser.add_argument(
        "--min_nproc",
        "--min-nproc",
        type=positive,
        metavar="N",
        help="start again with fewer ranks, N at least: parallel.dp_degree and sharding_degree "
        "shrink and train.per_device_train_batch_size grows, so that the numbers stay the same "
        "(default: with as many)",
    )
    parser.set_defaults(run=train)


def train(options: argparse.Namespace) -> int:
    """Train; a run that was stopped by a signal and saved ends with 128 + its number."""
    from paddle_vl.config.load import load_run_config

    config = load_run_config(options.config, options.overrides)
    if options.nproc > 1 or options.max_restarts > 0:
        return _train_in_ranks(options, config)

    from paddle_vl.parallel.store.membership import PeerWatch
    from paddle_vl.train.stop_signals import StopSignals

    with StopSignals() as stop, PeerWatch():
        configure_runtime()
        stop.set_handlers()
        from paddle_vl.train.build import build_trainer

        signal_number = build_trainer(config).run(stop)
    return 0 if signal_number is None else 128 + signal_number


def _train_in_ranks(options: argparse.Namespace, config: Any) -> int:
    from paddle_vl.train.restarts import Restarts

    restarts = Restarts(
        ["train", options.config, *options.overrides],
        config,
        options.nproc,
        options.max_restarts,
        options.min_nproc,
    )
    return launch(
        restarts.arguments,
        options.nproc,
        Path(config.train.output_dir) / "log",
        config.train.stop_grace_s,
        restarts.after,
    )


def natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _train_epilog() -> str:
    from paddle_vl.config.schema import setting_descriptions

    lines = [
        "examples:",
        "  paddle-vl train run.yaml",
        "  paddle-vl train run.yaml train.learning_rate=1e-4 'data.train=[a.jsonl, b.jsonl]'",
        "  paddle-vl train run.yaml train.resume_from_checkpoint=auto",
        "  paddle-vl train run.yaml --nproc 4 parallel.dp_degree=2 parallel.mp_degree=2",
        "",
        "Paths are relative to the current directory; those of images and videos in a data file to "
        "that file.",
        "",
        "train.output_dir receives:",
        "  config.yaml        the resolved settings, usable as CONFIG",
        "  run.json           git revision, package versions, device, command of every start",
        "  metrics.jsonl      one line per report; loss.png is its curve",
        "  checkpoint-STEP/   everything to continue from, also loads as a model",
        "  final/             the trained model in HF's layout, for evaluate and generate",
        "With model.lora, the last two hold adapters in PEFT's format instead of a model.",
        "  log/               with --nproc, workerlog.RANK of every rank",
        "",
        "Ctrl-C, SIGTERM or a closed terminal finishes the step, saves a checkpoint and exits with",
        "130, 143 or 129; once more ends at once, with 1. See train.stop_grace_s.",
        "",
        "settings (default):",
    ]
    for name, (default, description) in setting_descriptions().items():
        lines.append(f"  {name} ({'null' if default == 'None' else default})")
        lines += textwrap.wrap(description, 90, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)
