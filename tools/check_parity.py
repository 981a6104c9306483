"""Run golden cases with this package and compare every stored quantity.

    python tools/check_parity.py qwen_vl tests/golden/qwen_vl [MORE_FOLDERS ...]
    python tools/check_parity.py qwen_vl tests/golden/qwen_vl --processors
    python tools/check_parity.py qwen_vl tests/golden/qwen_vl --noise 8

Prints one line per case with the worst error of each group, then `N passed, N failed`. Exits 1
when a quantity exceeds its tolerance, a case kind is not supported, or no case is found.

`--processors` does so again as on other processors: with older vector instructions, with one thread
and two, with and without the compiled kernels. `--noise N` compares no golden values: it prints how
far noise of 1e-7 in the weights moves each group, the largest of N draws, from which a tolerance
follows on any processor.
"""

import argparse
import logging
import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from importlib import import_module
from itertools import product
from pathlib import Path

FAMILIES = {
    "grpo": "parity.grpo",
    "paddleocr_vl": "parity.paddleocr_vl",
    "pi07": "parity.pi07",
    "pi07_start": "parity.pi07_start",
    "preference": "parity.preference",
    "qwen3_5": "parity.qwen3_5",
    "qwen4_exp": "parity.qwen4_exp",
    "qwen_vl": "parity.qwen_vl",
}


# Variables by name: Paddle's matrix library reads one of the first two, by the processor's maker,
# oneDNN the third. What the processor lacks they leave alone.
_AVX2 = {
    "MKL_ENABLE_INSTRUCTIONS": "AVX2", "MKL_DEBUG_CPU_TYPE": "5", "ONEDNN_MAX_CPU_ISA": "AVX2",
}  # fmt: skip
PROCESSORS = {
    "own instructions": {"OMP_NUM_THREADS": "1"},
    "own instructions, two threads": {"OMP_NUM_THREADS": "2"},
    "AVX2": {"OMP_NUM_THREADS": "1", **_AVX2},
    "AVX2, two threads": {"OMP_NUM_THREADS": "2", **_AVX2},
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
    parser.add_argument(
        "--kernels", default="uncompiled", choices=["fused", "uncompiled", "plain"],
        help="fused: with the compiled ones, as commands take (default uncompiled)",
    )  # fmt: skip
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--processors", action="store_true", help="as on other processors too")
    others.add_argument("--noise", type=int, metavar="N", help="effect of noise in the weights")
    args = parser.parse_args()
    if args.processors:
        return _on_processors([text for text in sys.argv[1:] if text != "--processors"])

    import paddle

    from paddle_vl.compat import configure_cpu_runtime
    from paddle_vl.nn.cpu import compiled
    from paddle_vl.nn.dispatch import choose_kernels
    from paddle_vl.testing import emulated_bfloat16

    logging.getLogger("paddle_vl").setLevel(logging.WARNING)
    paddle.device.set_device(args.device)
    is_cpu = configure_cpu_runtime()
    choose_kernels(args.kernels)
    if is_cpu and args.kernels == "fused":
        compiled.enable()
    emulated = emulated_bfloat16() if is_cpu and args.dtype == "bfloat16" else nullcontext()
    try:
        family = import_module(FAMILIES[args.family])
        golden = family.FOLDERS(args.folders)
        cases = [case for case in golden.cases if args.case in (None, case.name)]
        passed = failed = 0
        if args.noise:
            _print_noise(family, golden, cases, args.noise)
            return 0
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


def _on_processors(arguments: list[str]) -> int:
    """Run this command in each environment."""
    codes = []
    for (name, variables), kernels in product(PROCESSORS.items(), ("fused", "uncompiled")):
        print(f"{name}, kernels {kernels}:", flush=True)
        command = [sys.executable, __file__, *arguments, "--kernels", kernels]
        codes.append(subprocess.run(command, env=os.environ | variables).returncode)
    return max(codes)


def _print_noise(family, golden, cases: list, draws: int) -> None:
    """Print the largest change of each group of each case."""
    from parity.recording import noisy_weights

    def reports() -> list:
        return list(family.run_cases(golden, cases, 1.0, "float32"))

    clean = reports()
    changes = [Counter() for _ in clean]
    for seed in range(draws):
        with noisy_weights(seed):
            for found, report, before in zip(changes, reports(), clean, strict=True):
                found |= Counter(report.changes(before))
    for report, found in zip(clean, changes, strict=True):
        groups = "  ".join(f"{group} {change:.2g}" for group, change in found.items())
        print(f"{report.name:<28} {groups}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
