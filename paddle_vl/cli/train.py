"""`paddle-vl train` and `paddle-vl report`: a run, and a page of its metrics."""

import argparse
import textwrap
from pathlib import Path
from typing import Any

from paddle_vl.cli.commands import configure_training_runtime, with_data_parallel
from paddle_vl.cli.hubs import read_run
from paddle_vl.cli.table import CONFIG, OVERRIDES, Command, natural, number, port, switch, value
from paddle_vl.parallel.launcher import launch

_EPILOG = """\
examples:
  paddle-vl train run.yaml
  paddle-vl train run.yaml train.learning_rate=1e-4 'data.train=[a.jsonl, b.jsonl]'
  paddle-vl train run.yaml train.resume_from_checkpoint=auto
  paddle-vl train run.yaml --nproc 4 parallel.dp_degree=2 parallel.mp_degree=2

Paths are relative to the current directory; image and video paths in a data file are relative to
that file.

train.output_dir receives:
  config.yaml        the resolved settings, usable as CONFIG
  run.json           git revision, package versions, device, command of every start
  metrics.jsonl      one line per report; loss.png is its curve
  checkpoint-STEP/   everything to resume from, also loads as a model
  final/             the trained model in HF's layout, for evaluate and generate
  log/               with --nproc, workerlog.RANK of every rank
With model.lora, checkpoint-STEP/ and final/ hold adapters in PEFT's format instead of a model.

Ctrl-C, SIGTERM or a closed terminal finishes the step, saves a checkpoint and exits with
130, 143 or 129; a second one exits at once with 1. See train.stop_grace_s."""

_PORT = 8321
_REPORT_EPILOG = """\
examples:
  paddle-vl report runs/doors
  paddle-vl report runs/doors runs/doors_lora --output comparison
  paddle-vl report --watch 8321 runs/doors

report.html needs no other file and no network. It has the loss, its terms and evaluations, learning
rates, gradient norm, throughput, memory and all other metrics of metrics.jsonl over steps, epochs
or tokens; the results, the settings that differ, git revisions and package versions. A PNG of each
panel is written beside it. Answers that `paddle-vl evaluate --predictions RUN/predictions.jsonl`
wrote are shown with their pictures. The report of a running run shows the metrics so far."""


def train(options: argparse.Namespace) -> int:
    """Train.

    Returns:
        0, or 128 + signal number after a signal to stop, with a checkpoint saved.
    """
    config = read_run(options)
    if options.nproc > 1 or options.max_restarts > 0:
        return _train_in_ranks(options, with_data_parallel(options, config))

    from paddle_vl.parallel.store.membership import PeerWatch
    from paddle_vl.train.stop_signals import StopSignals

    with StopSignals() as stop, PeerWatch():
        configure_training_runtime()
        stop.set_handlers()
        from paddle_vl.train.build import build_trainer

        signal_number = build_trainer(config).run(stop)
    return 0 if signal_number is None else 128 + signal_number


def _train_in_ranks(options: argparse.Namespace, config: Any) -> int:
    from paddle_vl.config.parallel_settings import launch_variables
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
        variables=launch_variables(config.parallel),
    )


def _epilog() -> str:
    from paddle_vl.config.family_settings import settings_help

    lines = [_EPILOG]
    for title, parts, described in settings_help():
        lines += ["", f"{title} (default):"]
        if parts:
            lines.append(f"  parts of the model: {', '.join(parts)}")
        for name, (default, description) in described.items():
            lines.append(f"  {name} ({default})")
            lines += textwrap.wrap(
                description, 90, initial_indent=" " * 6, subsequent_indent=" " * 6
            )
    return "\n".join(lines)


TRAIN = Command(
    train,
    "train a model with the settings of a YAML file",
    "Train a model with the settings of a YAML file.",
    _epilog,
    [
        CONFIG,
        OVERRIDES,
        number(
            "--nproc",
            "start N ranks on this machine (default 1); the parallel.*_degree settings must "
            "multiply to N, and if none is set the ranks are data parallel. Use fleetrun for "
            "several machines",
            1,
        ),
        value(
            "--max_restarts --max-restarts",
            "N",
            "if a rank dies in training, restart from the last good checkpoint, up to N times "
            "(default 0)",
            type=natural,
            default=0,
        ),
        number(
            "--min_nproc --min-nproc",
            "restart with fewer ranks, at least N: parallel.dp_degree and sharding_degree shrink "
            "and train.per_device_train_batch_size grows, so that the numbers stay the same "
            "(default: the same number of ranks)",
        ),
    ],
)


def report(options: argparse.Namespace) -> int:
    """Write a report and print its path."""
    from paddle_vl.report.report import write_report
    from paddle_vl.report.watch import ReportServer

    if options.watch is not None:
        if options.output or options.no_png:
            raise ValueError("--watch writes nothing: leave --output and --no-png out")
        with ReportServer(options.runs, options.watch, options.seeds) as server:
            print(f"the report is at {server.address}; Ctrl-C ends it", flush=True)
            server.serve_forever()
    home = Path(options.runs[0]) if len(options.runs) == 1 else Path()
    output_dir = Path(options.output) if options.output else home / "report"
    page, *pictures = write_report(
        options.runs, output_dir, with_pictures=not options.no_png, joins_seeds=options.seeds
    )
    print(f"report written to {page}" + (f", {len(pictures)} pictures beside it" * bool(pictures)))
    return 0


REPORT = Command(
    report,
    "curves and settings of one or several runs as a page",
    "Draw the metrics of one or several runs into one HTML file and PNGs, and list the settings in "
    "which the runs differ.",
    _REPORT_EPILOG,
    [
        value("runs", "RUN", "the train.output_dir of a run", nargs="+"),
        value(
            "--output",
            "DIR",
            "folder for the report (default: report/ in the run's folder; for several runs, in the "
            "current one)",
        ),
        switch("--no-png", "write the page without PNGs"),
        switch(
            "--seeds",
            "show runs that differ only in train.seed as one: the mean, with a band from the least "
            "to the most",
        ),
        value(
            "--watch",
            "PORT",
            "write nothing: serve the page to browsers of this machine at http://127.0.0.1:PORT "
            f"(default {_PORT}; 0 for any free one) and refresh it while the runs go on",
            nargs="?",
            type=port,
            const=_PORT,
        ),
    ],
)
