"""`paddle-vl profile`: time and memory of a training step, for one configuration or a matrix."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paddle_vl.cli.commands import (
    add_run,
    configure_runtime,
    configure_training_runtime,
    positive,
    with_data_parallel,
)
from paddle_vl.cli.opentau_words import WORDS_HELP, Variables
from paddle_vl.parallel.launcher import launch

_STEPS, _REPEATS = 20, 3
_ATTENTION = ("eager", "sdpa")
_SHARDING = ("none", "dp", "stage1", "stage2", "stage3")
_EPILOG = f"""\
examples:
  paddle-vl profile run.yaml train.recompute=full
  paddle-vl profile run.yaml --nproc 2 parallel.sharding_degree=2 parallel.sharding_stage=2
  paddle-vl profile run.yaml --nproc 2 --matrix --synthetic --cameras 1 2 --memory-limit-gb 3

The profile runs the training itself: the same model, optimizer, loader and step. The run's
output_dir is neither read nor written.

--out receives:
  profile.json   phases, throughput, memory, settings
  log/           output of every rank, with --nproc
With --matrix it receives instead:
  matrix.json, matrix.md, matrix.png   all cells, a table with the recommendation, a plot
  cells/         cell.json, profile.json and output of each cell; a restarted matrix runs only
                 cells that are missing, have failed, or were run with other settings

{WORDS_HELP}"""


def add_profile(subparsers: argparse._SubParsersAction) -> None:
    """`paddle-vl profile CONFIG [section.name=value ...]`"""
    parser = subparsers.add_parser(
        "profile",
        help="time and memory of a run's training step",
        description="Train a few steps with the settings of a YAML file, and print the time of "
        "each phase and the memory; or do so for every choice of sharding, attention, "
        "recomputation and cameras at growing batch sizes, and recommend one.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run(parser, "start N ranks on this machine (default 1)")
    parser.add_argument(
        "--warmup", type=int, default=5, metavar="N", help="warmup steps (default 5)"
    )
    parser.add_argument(
        "--steps", type=positive, metavar="N", help=f"measured steps (default {_STEPS})"
    )
    parser.add_argument("--json", metavar="FILE", help="write profile.json to this file too")
    parser.add_argument(
        "--no-optimizer",
        action="store_true",
        help="measure forward and backward alone: no moments, gradient norm and updates",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder for the result (default: profile/ in train.output_dir)"
    )
    parser.add_argument(
        "--memory-limit-gb",
        type=float,
        metavar="GB",
        help="memory that a rank may use, in 10^9 bytes (on a CPU its resident set); the profile "
        "ends above it (default: the GPU's memory; none on a CPU, where a matrix needs one)",
    )
    _add_workload(parser)
    _add_matrix(parser)
    parser.set_defaults(run=profile)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    workload = parser.add_argument_group("synthetic data")
    workload.add_argument(
        "--synthetic",
        action="store_true",
        help="train on generated samples of the configured shapes instead of data.train, with the "
        "configured drop probabilities",
    )
    workload.add_argument(
        "--cameras",
        "--num_cams",
        type=positive,
        nargs="+",
        metavar="N",
        help="cameras of a policy, on its own data too (default: as configured), or images in each "
        "conversation (default: 1); several numbers with --matrix",
    )
    workload.add_argument(
        "--image-side",
        type=positive,
        metavar="PIXELS",
        help="height and width of an image in a conversation, before the processor resizes it "
        "(default 448)",
    )
    workload.add_argument(
        "--answer-tokens",
        type=positive,
        metavar="N",
        help="tokens of the answer in a conversation (default 64)",
    )


def _add_matrix(parser: argparse.ArgumentParser) -> None:
    matrix = parser.add_argument_group(
        "matrix", "Each cell (a choice at a batch size) runs in new processes."
    )
    matrix.add_argument("--matrix", action="store_true", help="profile all choices")
    matrix.add_argument(
        "--sharding",
        nargs="+",
        choices=_SHARDING,
        metavar="CHOICE",
        help="dp, stage1, stage2, stage3, or none for one rank (default: all that fit --nproc)",
    )
    matrix.add_argument(
        "--recompute",
        nargs="+",
        choices=("none", "full"),
        metavar="CHOICE",
        help="none, full (default: both)",
    )
    matrix.add_argument(
        "--attention",
        nargs="+",
        choices=_ATTENTION,
        metavar="CHOICE",
        help="eager, sdpa; of a policy's attention (default: both)",
    )
    matrix.add_argument(
        "--repeats",
        type=positive,
        metavar="N",
        help="runs of each cell; the median is shown, beside the slowest and the fastest "
        f"(default {_REPEATS})",
    )
    matrix.add_argument(
        "--batch-sizes",
        type=positive,
        nargs="+",
        metavar="N",
        help="sizes to try, in ascending order until one is too large (default: double until one "
        "is too large, then bisect)",
    )
    matrix.add_argument(
        "--first-batch", type=positive, metavar="N", help="first size of the doubling (default 1)"
    )
    matrix.add_argument(
        "--largest-batch", type=positive, metavar="N", help="last size of the doubling (default 64)"
    )
    matrix.add_argument(
        "--cell-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds for a cell, its start included (default 600)",
    )
    matrix.add_argument(
        "--memory-share",
        type=float,
        default=0.85,
        metavar="SHARE",
        help="share of the limit that a recommended cell may use (default 0.85)",
    )


def profile(options: argparse.Namespace) -> int:
    """Print a profile, or run a matrix.

    Returns:
        0, or 1 if no cell of the matrix fits.
    """
    from paddle_vl.config.load import load_run_config

    config = load_run_config(options.config, options.overrides)
    _take_variables(options, config, Variables.read())
    config = load_run_config(options.config, options.overrides)
    out = Path(options.out or Path(config.train.output_dir) / "profile")
    if options.warmup < 0:
        raise ValueError(f"--warmup {options.warmup}: it must be 0 or more")
    if options.json and not Path(options.json).resolve().parent.is_dir():
        raise ValueError(f"--json or PROFILE_STEP_JSON {options.json}: its folder does not exist")
    _check_options(options)
    settings = _profile_settings(options, out)
    if options.matrix:
        configure_runtime()
        return _matrix(options, config, settings)
    if options.nproc > 1:
        with_data_parallel(options, config)
        command = ["profile", options.config, *options.overrides, *settings.arguments()]
        return launch(command, options.nproc, out / "log")

    from paddle_vl.train.stop_signals import StopSignals

    with StopSignals() as stop:
        configure_training_runtime()
        stop.set_handlers()
        from paddle_vl.profile.run import run_profile

        run_profile(config, settings)
    return 0


def _take_variables(options: argparse.Namespace, config: Any, variables: Variables) -> None:
    """Add OpenTau's variables to the options, where the command line does not say otherwise."""
    options.steps = options.steps or variables.steps or _STEPS
    options.json = options.json or variables.json
    options.no_optimizer = options.no_optimizer or variables.no_optimizer
    if options.matrix:
        for name in ("attention", "recompute"):
            value = getattr(variables, name)
            if value is not None and getattr(options, name) is None:
                setattr(options, name, [value])
        return
    given = {override.partition("=")[0] for override in options.overrides}
    from paddle_vl.profile.workload import attention_settings, recompute_settings

    settings: list[Mapping[str, Any]] = []
    if variables.attention is not None:
        settings.append(attention_settings(config, variables.attention))
    if variables.recompute is not None:
        settings.append(recompute_settings(config, variables.recompute))
    for values in settings:
        if given.isdisjoint(values):
            options.overrides += [f"{name}={value}" for name, value in values.items()]


def _profile_settings(options: argparse.Namespace, out: Path) -> Any:
    from paddle_vl.profile.workload import ProfileSettings, Workload

    # In a matrix each choice has its number of cameras.
    cameras = options.cameras[0] if options.cameras and not options.matrix else None
    return ProfileSettings(
        out,
        Workload(options.synthetic, cameras, options.image_side, options.answer_tokens),
        warmup_steps=options.warmup,
        steps=options.steps,
        memory_limit_gb=options.memory_limit_gb,
        updates=not options.no_optimizer,
        copy=None if options.json is None else Path(options.json),
    )


_OF_A_MATRIX = (
    "sharding", "recompute", "attention", "repeats", "batch_sizes", "first_batch", "largest_batch"
)  # fmt: skip


def _check_options(options: argparse.Namespace) -> None:
    if options.matrix:
        if options.batch_sizes and (options.first_batch or options.largest_batch):
            raise ValueError(
                "--batch-sizes are all sizes: leave --first-batch and --largest-batch out"
            )
        if options.json is not None:
            raise ValueError(
                f"--json or PROFILE_STEP_JSON names {options.json} for one profile; a matrix "
                "writes matrix.json into --out: leave it out"
            )
        return
    for name in _OF_A_MATRIX:
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} is about a matrix: give --matrix too")
    if options.cameras and len(options.cameras) > 1:
        raise ValueError(f"--cameras {options.cameras}: several numbers need --matrix")


def _matrix(options: argparse.Namespace, config: Any, profile: Any) -> int:
    from paddle_vl.profile.cells import Growth
    from paddle_vl.profile.matrix import MatrixSettings, all_choices, run_matrix
    from paddle_vl.profile.matrix_report import write_report
    from paddle_vl.profile.workload import has_policy_settings

    settings = MatrixSettings(
        profile,
        options.nproc,
        all_choices(
            options.sharding or (_SHARDING[1:] if options.nproc > 1 else _SHARDING[:1]),
            options.recompute or ("none", "full"),
            options.cameras or (None,),
            options.attention or (_ATTENTION if has_policy_settings(config) else (None,)),
        ),
        Growth(
            options.first_batch or 1, options.largest_batch or 64, sizes=options.batch_sizes or ()
        ),
        options.cell_seconds,
        options.repeats or _REPEATS,
    )
    cells = run_matrix(options.config, options.overrides, settings)
    print(write_report(cells, settings, options.memory_share))
    return 0 if any(cell.status == "ok" for cell in cells) else 1
