"""All measurements of speed on this machine, one after the other, with references on torch.

    python tools/benchmarks/cpu.py --hf PYTHON --opentau PYTHON     # about half an hour
    python tools/benchmarks/cpu.py --hf PYTHON --opentau PYTHON --before CHECKOUT --write-docs

Training steps of both families with and without C kernels, and their parts; kernels by oneDNN;
generation of the model, its programs and ONNX, a policy's chunk of actions, stored weights, the
data path, and the head with its loss. Each is a benchmark of its own, which compares its sides in
turn and prints ratios with their spread; docs/cpu_speed.md leads to all tables. `--hf` and
`--opentau` name interpreters of environments with torch and transformers, and with torch and
opentau; without them there is no reference. `--write-docs` writes the tables into the pages of
docs/. `--before` names an older checkout; without it the parts of steps stay out of the page.
"""

import argparse
import shlex
import subprocess
import sys
import time
from typing import NamedTuple

from harness import ROOT


class Benchmark(NamedTuple):
    """A benchmark's script with its options, and the page that has its markers.

    Attributes:
        reference: `hf` or `opentau`, the interpreter that its `--against` gets.
        takes_before: whether it has `--before`; it writes its page with that only.
        picture: file that it draws with `--plot`.
    """

    script: str
    page: str
    options: str = ""
    reference: str = ""
    takes_before: bool = False
    picture: str = ""


BENCHMARKS = (
    Benchmark("step.py", "README.md", "--family qwen3_vl", "hf"),
    Benchmark("step.py", "README.md", "--family pi07", "opentau"),
    Benchmark(
        "step.py",
        "docs/cpu_speed.md",
        "--family qwen3_vl --no-compiler train.recompute=full",
        "hf",
    ),
    Benchmark(
        "step.py",
        "docs/cpu_speed.md",
        "--family pi07 --no-compiler train.recompute=full",
        "opentau",
    ),
    Benchmark(
        "step_parts.py",
        "docs/cpu_speed.md",
        picture="docs/images/cpu_step_parts.png",
        takes_before=True,
    ),
    Benchmark("onednn.py", "docs/cpu_speed.md"),
    Benchmark("export.py", "docs/export.md", "--tokens 16 --rounds 3 --repeats 1 --parts", "hf"),
    Benchmark("export_pi07.py", "docs/export.md", "--rounds 3"),
    Benchmark("stored_weights.py", "docs/export.md", "--repeats 1"),
    Benchmark("data_path.py", "docs/data_path.md", "", "hf"),
    Benchmark("head_loss.py", "docs/step_overhead.md"),
)


def command(
    benchmark: Benchmark, references: dict[str, str | None], before: str | None, writes: bool
) -> list[str]:
    """The command line of one benchmark."""
    against = references.get(benchmark.reference)
    script = ROOT / "tools" / "benchmarks" / benchmark.script
    line = [sys.executable, str(script), *shlex.split(benchmark.options)]
    if against:
        line += ["--against", against]
    if before and benchmark.takes_before:
        line += ["--before", before]
    if not writes or (benchmark.takes_before and not before):
        return line
    if benchmark.picture:
        line += ["--plot", str(ROOT / benchmark.picture)]
    return [*line, "--write-doc", str(ROOT / benchmark.page)]


def main() -> int:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("--hf", metavar="PYTHON", help="an interpreter with HF transformers")
    made.add_argument("--opentau", metavar="PYTHON", help="an interpreter with OpenTau")
    made.add_argument(
        "--before", metavar="CHECKOUT", help="an older checkout, to show where its step's time goes"
    )
    made.add_argument("--write-docs", action="store_true", help="write the tables into the pages")
    made.add_argument("--only", nargs="+", metavar="SCRIPT", help="some of the scripts")
    options = made.parse_args()
    references = {"hf": options.hf, "opentau": options.opentau}
    chosen = [b for b in BENCHMARKS if not options.only or b.script in options.only]
    if not chosen:
        made.error(f"--only: the scripts are {', '.join(sorted({b.script for b in BENCHMARKS}))}")
    failed = []
    for benchmark in chosen:
        name, begin = f"{benchmark.script} {benchmark.options}".strip(), time.monotonic()
        print(f"== {name}", flush=True)
        line = command(benchmark, references, options.before, options.write_docs)
        if subprocess.run(line).returncode:
            failed.append(name)
        print(f"-- {time.monotonic() - begin:.0f} s\n", flush=True)
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
