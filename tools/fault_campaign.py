"""Inject faults into real training runs, resume the runs, and compare them with undisturbed ones.

    python tools/fault_campaign.py                        # ten faults, two minutes or so
    python tools/fault_campaign.py --all --jobs 2         # every kind with every start
    python tools/fault_campaign.py --kinds power-loss kill-rank --starts nproc4 --seed 3

A fault hits a tiny run of 1, 2 or 4 ranks (data and tensor parallel, sharding stage 3, pipeline,
colocated schedule) at a random moment, drawn from the seed. When the run has ended, the same
command is started again with train.resume_from_checkpoint=auto. Prints a line per fault, then a
table: per kind, how many were injected, recovered from bit-identically (final weights, optimizer
state, losses), lost something, or left processes running 10 s later, and how long the shutdown
took. A run that prints a traceback has not recovered. Exits 1 unless all recovered, nothing was
lost and nothing was left running.
"""

import argparse
import sys
from pathlib import Path

from faults.campaign import plan, run_campaign
from faults.kinds import KINDS
from faults.runs import STARTS


def main() -> int:
    kinds = "\n".join(f"  {fault.name:24} {fault.sentence}" for fault in KINDS.values())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"kinds:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", type=int, default=10, metavar="N", help="how many (default 10)")
    parser.add_argument(
        "--all", action="store_true", help="every kind with every start, at least 200 faults"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, metavar="KIND", help="only these")
    parser.add_argument(
        "--starts", nargs="+", choices=STARTS, default=list(STARTS), help="only these (default all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (default 0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at once (default 1)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keeps runs that failed here")
    args = parser.parse_args()
    if args.faults < 1 or args.jobs < 1:
        parser.error("--faults and --jobs are numbers from 1")

    faults = [KINDS[name] for name in args.kinds or KINDS]
    planned = plan(faults, args.starts, args.seed, None if args.all else args.faults)
    if not planned:
        print("fault_campaign: none of these kinds has one of these starts", file=sys.stderr)
        return 1
    try:
        is_good = run_campaign(planned, args.jobs, args.keep, lambda line: print(line, flush=True))
    except RuntimeError as error:
        print(f"fault_campaign: {error}", file=sys.stderr)
        return 1
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
