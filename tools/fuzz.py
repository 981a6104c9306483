"""Feed damaged and hostile files to every parser; each must return a result or refuse the file.

An input escapes if it raises any other exception, takes too much time or memory, kills the process,
or touches files outside its folder. The smallest input of each fault is shown.
"""

import argparse
import io
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--parsers", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--list", action="store_true", help="name the parsers and end")
    parser.add_argument("--inputs", type=int, default=200, help="for each parser")
    parser.add_argument("--seed", type=int, default=0, help="the same one gives the same inputs")
    parser.add_argument("--seconds-per-input", type=float, default=5)
    parser.add_argument("--memory-mb", type=float, default=1024, help="MiB that an input may take")
    parser.add_argument("--save", type=Path, help="folder for the smallest input of each fault")
    given = parser.parse_args()

    # Imported here so that --help needs no dependencies.
    from fuzzing.campaign import Limits, run_all
    from fuzzing.parser import PARSERS

    if given.list:
        print("\n".join(PARSERS))
        return 0
    names = given.parsers or list(PARSERS)
    if unknown := [name for name in names if name not in PARSERS]:
        parser.error(f"there are no parsers {unknown}; there are {', '.join(PARSERS)}")
    # Tracebacks may quote lone surrogates, which a terminal cannot print.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    limits = Limits(given.inputs, given.seed, given.seconds_per_input, given.memory_mb)
    return run_all(names, limits, given.save)


if __name__ == "__main__":
    sys.exit(main())
