"""`paddle-vl show-data`: samples of a run as its model sees them."""

import argparse
import sys
from pathlib import Path

from paddle_vl.cli.commands import add_command, add_number, add_switch, add_value, natural


def add_show_data(subparsers: argparse._SubParsersAction) -> None:
    """`paddle-vl show-data CONFIG [--page FILE]`"""
    parser = add_command(
        subparsers,
        show_data,
        "print samples of a run as its model sees them",
        "Print samples of a run after the chat template, with the text that carries the loss in "
        "colour (between [[ and ]] where the output is no terminal), and write a page with the "
        "pictures as they are resized, and the boxes of the answers drawn on them. No weights are "
        "read.",
        "examples:\n  paddle-vl show-data run.yaml\n"
        "  paddle-vl show-data run.yaml --samples 50 --page samples.html "
        "'data.train=[talks.json]'",
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file with the run's settings")
    parser.add_argument(
        "overrides",
        metavar="section.name=value",
        nargs="*",
        help="setting that overrides the file's",
    )
    add_number(parser, "--samples", "number of samples (default 3)", 3)
    text = "number of the first sample, from 0 (default 0)"
    add_value(parser, "--first", "N", text, type=natural, default=0)
    add_switch(parser, "--eval", "samples of data.eval in place of data.train")
    add_value(parser, "--page", "FILE", "write a page with pictures too", type=Path)


def show_data(options: argparse.Namespace) -> int:
    """Print the samples, and write the page."""
    from paddle_vl.config.families import family_of_run
    from paddle_vl.config.load import load_run_config
    from paddle_vl.report.samples_page import as_text, page

    config = load_run_config(options.config, options.overrides)
    recipe = family_of_run(config).recipe_class()(config, None)
    samples = list(recipe.shown_samples(options.eval, options.first, options.samples))
    for sample in samples:
        print(as_text(sample, sys.stdout.isatty()))
    if options.page is not None:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        title = f"Samples of {options.config}"
        options.page.write_text(page(samples, title), encoding="utf-8")
        print(f"the pictures are in {options.page}")
    return 0
