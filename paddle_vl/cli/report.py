"""`paddle-vl report`: the curves and settings of runs on one page."""

import argparse
from pathlib import Path

_EPILOG = """\
examples:
  paddle-vl report runs/doors
  paddle-vl report runs/doors runs/doors_lora --output comparison

report.html holds everything that it shows and opens without a network: loss with its terms and
evaluations, learning rates, gradient norm, throughput, memory and whatever else the runs'
metrics.jsonl have, over steps, epochs or tokens; the results, the settings that differ, git
revisions and package versions. A PNG of each panel lies beside it. A run that is still going can be
looked at; make the report again for more of it."""


def add_report(subparsers: argparse._SubParsersAction) -> None:
    """`paddle-vl report RUN [RUN ...] [--output DIR]`"""
    parser = subparsers.add_parser(
        "report",
        help="curves and settings of one or several runs as a page",
        description="Draw the metrics of one or several runs into one HTML file and PNGs, and "
        "tell in what the runs differ.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the train.output_dir of a run")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder for the report (default: report/ in the run's, for several runs in the "
        "current one)",
    )
    parser.add_argument("--no-png", action="store_true", help="write the page alone")
    parser.set_defaults(run=report)


def report(options: argparse.Namespace) -> int:
    """Write a report and say where it is."""
    from paddle_vl.report.report import write_report

    home = Path(options.runs[0]) if len(options.runs) == 1 else Path()
    output_dir = Path(options.output) if options.output else home / "report"
    page, *pictures = write_report(options.runs, output_dir, with_pictures=not options.no_png)
    print(f"report written to {page}" + (f", {len(pictures)} pictures beside it" * bool(pictures)))
    return 0
