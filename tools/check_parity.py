"""Run golden cases with this package and compare every stored quantity.

    python tools/check_parity.py qwen_vl tests/golden/qwen_vl [MORE_FOLDERS ...]

Prints one line per case with the worst error of each group, then `N passed, N failed`. Exits 1
when a quantity exceeds its tolerance, a case kind is not supported, or no case is found.
"""

import argparse
import logging
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

FAMILIES = {
    "pi07": "parity.pi07",
    "pi07_start": "parity.pi07_start",
    "preference": "parity.preference",
    "qwen3_5": "parity.qwen3_5",
    "qwen_vl": "parity.qwen_vl",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="where cases lie")
    parser.add_argument("--case", help="run only the case of this name")
    parser.add_argument("--tolerance-scale", type=float, default=1.0, help="multiplies tolerances")
    parser.add_argument("--device", default="cpu", help="cpu, gpu or gpu:N (default cpu)")
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"],
        help="of parameters (default float32); on a CPU bfloat16 is emulated",
    )  # fmt: skip
    args = parser.parse_args()

    import paddle

    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.testing import emulated_bfloat16

    logging.getLogger("paddle_vl").setLevel(logging.WARNING)
    paddle.device.set_device(args.device)
    is_cpu = configure_cpu_runtime()
    emulated = emulated_bfloat16() if is_cpu and args.dtype == "bfloat16" else nullcontext()
    try:
        family = import_module(FAMILIES[args.family])
        golden = family.FOLDERS(args.folders)
        cases = [case for case in golden.cases if args.case in (None, case.name)]
        passed = failed = 0
        with emulated:
            for report in family.run_cases(golden, cases, args.tolerance_scale, args.dtype):
                print(report.line(), *report.failure_lines(), sep="\n", flush=True)
                passed, failed = passed + report.passed, failed + (not report.passed)
    except ValueError as error:
        print(f"check_parity: {error}", file=sys.stderr)
        return 1
    if not passed + failed:
        print(f"check_parity: no case found under {', '.join(map(str, args.folders))}")
    print(f"{passed} passed, {failed} failed")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
