"""`paddle-vl profile`: time and memory of a training step, for one configuration or a matrix."""

import argparse
from pathlib import Path
from typing import Any

from paddle_vl.cli.commands import (
    configure_runtime,
    configure_training_runtime,
    with_data_parallel,
)
from paddle_vl.cli.hubs import read_run
from paddle_vl.cli.opentau_words import WORDS_HELP
from paddle_vl.cli.table import (
    CONFIG,
    OVERRIDES,
    Command,
    grouped,
    number,
    positive,
    switch,
    value,
)
from paddle_vl.parallel.launcher import launch

_REPEATS = 3
_ATTENTION = ("eager", "sdpa")
_RECOMPUTE = ("none", "act", "attention", "mlp", "full")
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


def profile(options: argparse.Namespace) -> int:
    """Print a profile, or run a matrix.

    Returns:
        0, or 1 if no cell of the matrix fits.
    """
    _check_options(options)
    config = read_run(options)
    if not options.matrix:
        config = _with_choices(options, config)
    out = Path(options.out or Path(config.train.output_dir) / "profile")
    settings = _profile_settings(options, out)
    if options.matrix:
        configure_runtime()
        return _run_matrix(options, config, settings)
    if options.nproc > 1:
        with_data_parallel(options, config)
        from paddle_vl.config.parallel_settings import launch_variables

        command = ["profile", options.config, *options.overrides, *settings.arguments()]
        variables = launch_variables(config.parallel)
        return launch(command, options.nproc, out / "log", variables=variables)

    from paddle_vl.train.stop_signals import StopSignals

    with StopSignals() as stop:
        configure_training_runtime()
        stop.set_handlers()
        from paddle_vl.profile.run import run_profile

        run_profile(config, settings)
    return 0


def _with_choices(options: argparse.Namespace, config: Any) -> Any:
    """The settings with --attention and --recompute, where the command line does not set them."""
    from paddle_vl.profile.workload import attention_settings, recompute_settings

    given = {override.partition("=")[0] for override in options.overrides}
    chosen = {
        **(attention_settings(config, *options.attention) if options.attention else {}),
        **(recompute_settings(config, *options.recompute) if options.recompute else {}),
    }
    options.overrides += [f"{name}={text}" for name, text in chosen.items() if name not in given]
    return read_run(options)


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


def _check_options(options: argparse.Namespace) -> None:
    if options.warmup < 0:
        raise ValueError(f"--warmup {options.warmup}: it must be 0 or more")
    if options.json and not Path(options.json).resolve().parent.is_dir():
        raise ValueError(f"--json or PROFILE_STEP_JSON {options.json}: its folder does not exist")
    if options.matrix:
        if options.json is not None:
            raise ValueError(
                f"--json or PROFILE_STEP_JSON names {options.json} for one profile; a matrix "
                "writes matrix.json into --out: leave it out"
            )
        return
    for name in ("sharding", "repeats", "batch_sizes"):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} is about a matrix: give --matrix too")
    for name in ("attention", "recompute", "cameras"):
        if len(found := getattr(options, name) or ()) > 1:
            raise ValueError(f"--{name} {found}: several of them need --matrix")


def _run_matrix(options: argparse.Namespace, config: Any, profile: Any) -> int:
    from paddle_vl.profile.cells import Growth
    from paddle_vl.profile.matrix import MatrixSettings, all_choices, run_matrix
    from paddle_vl.profile.matrix_report import write_report
    from paddle_vl.profile.workload import has_policy_settings

    settings = MatrixSettings(
        profile,
        options.nproc,
        all_choices(
            options.sharding or (_SHARDING[1:] if options.nproc > 1 else _SHARDING[:1]),
            options.recompute or _RECOMPUTE,
            options.cameras or (None,),
            options.attention or (_ATTENTION if has_policy_settings(config) else (None,)),
        ),
        Growth(options.batch_sizes or ()),
        options.cell_seconds,
        options.repeats or _REPEATS,
    )
    cells = run_matrix(options.config, options.overrides, settings)
    print(write_report(cells, settings, options.memory_share))
    return 0 if any(cell.status == "ok" for cell in cells) else 1


_MATRIX, _SYNTHETIC = "matrix", "synthetic data"
PROFILE = Command(
    profile,
    "time and memory of a run's training step",
    "Train a few steps with the settings of a YAML file, and print the time of each phase and the "
    "memory; or do so for every choice of sharding, attention, recomputation and cameras at "
    "growing batch sizes, and recommend one.",
    _EPILOG,
    [
        CONFIG,
        OVERRIDES,
        number("--nproc", "start N ranks on this machine (default 1)", 1),
        value("--warmup", "N", "warmup steps (default 5)", type=int, default=5),
        number("--steps", "measured steps (default 20)", 20),
        value("--json", "FILE", "write profile.json to this file too"),
        switch("--no-optimizer",
               "measure forward and backward alone: no moments, gradient norm and updates"),
        value("--out", "DIR", "folder for the result (default: profile/ in train.output_dir)"),
        value("--memory-limit-gb", "GB",
              "memory that a rank may use, in 10^9 bytes (on a CPU its resident set); the profile "
              "ends above it (default: the GPU's memory; none on a CPU, where a matrix needs one)",
              type=float),
        value("--recompute", "CHOICE",
              "none, act, attention, mlp or full (default: as configured; all with --matrix)",
              nargs="+", choices=_RECOMPUTE),
        value("--attention", "CHOICE",
              "eager or sdpa, a policy's attention (default: as configured; both with --matrix)",
              nargs="+", choices=_ATTENTION),
        *grouped(
            _SYNTHETIC,
            switch("--synthetic",
                   "train on generated samples of the configured shapes instead of data.train, "
                   "with the configured drop probabilities"),
            value("--cameras --num_cams", "N",
                  "cameras of a policy, on its own data too (default: as configured), or images in "
                  "each conversation (default: 1); several numbers with --matrix",
                  type=positive, nargs="+"),
            number("--image-side",
                   "height and width of an image in a conversation, in pixels before the processor "
                   "resizes it (default 448)"),
            number("--answer-tokens", "tokens of the answer in a conversation (default 64)"),
        ),
        *grouped(
            _MATRIX,
            switch("--matrix", "profile all choices"),
            value("--sharding", "CHOICE",
                  "dp, stage1, stage2, stage3, or none for one rank (default: all that fit "
                  "--nproc)", nargs="+", choices=_SHARDING),
            number("--repeats",
                   "runs of each cell; the median is shown, beside the slowest and the fastest "
                   f"(default {_REPEATS})"),
            value("--batch-sizes", "N",
                  "sizes to try, in ascending order until one is too large (default: double, to 64 "
                  "at most, until one is too large, then bisect)", type=positive, nargs="+"),
            value("--cell-seconds", "S", "seconds for a cell, its start included (default 600)",
                  type=float, default=600.0),
            value("--memory-share", "SHARE",
                  "share of the limit that a recommended cell may use (default 0.85)",
                  type=float, default=0.85),
        ),
    ],
    {_MATRIX: "Each cell (a choice at a batch size) runs in new processes."},
)  # fmt: skip
