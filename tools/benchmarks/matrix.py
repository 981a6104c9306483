"""Matrix of sharding, attention, recomputation, cameras and batch size for a small pi07 on two CPU
ranks.

    python tools/benchmarks/matrix.py --out runs/matrix --write-doc docs/profiling.md

Runs `paddle-vl profile --matrix` on `configs/profile/pi07_cpu.yaml` and shows its matrix.md. Cells
that are in the folder already are not run again, so an interrupted matrix can be continued.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from harness import ROOT, make_data, parser, provenance, write_section

IMAGE = "images/profile_pi07_cpu.png"


def main() -> int:
    made = parser(__doc__, json=False)
    made.add_argument("--out", type=Path, required=True, help="folder of the matrix")
    made.add_argument("--cameras", nargs="+", default=["1", "2"], help="(default 1 2)")
    made.add_argument("--batch-sizes", nargs="+", default=["4", "8", "16"], help="(default 4 8 16)")
    made.add_argument("--attention", nargs="+", default=["eager", "sdpa"], help="(default both)")
    made.add_argument("--repeats", default="3", help="runs of each cell (default 3)")
    options = made.parse_args()
    out = options.out.resolve()
    processor = make_data("pi07", out / "data").parent / "processor"
    config = ROOT / "configs" / "profile" / "pi07_cpu.yaml"
    command = [sys.executable, "-m", "paddle_vl", "profile", str(config)]
    command += [f"data.processor={processor}", "--nproc", "2", "--matrix", "--synthetic"]
    command += ["--memory-limit-gb", "1", "--warmup", "1", "--steps", "5", "--out", str(out)]
    command += ["--cameras", *options.cameras, "--batch-sizes", *options.batch_sizes]
    command += ["--attention", *options.attention, "--repeats", options.repeats]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if subprocess.run(command, env=environment).returncode:
        return 1
    if options.write_doc is not None:
        text = (out / "matrix.md").read_text(encoding="utf-8").strip()
        write_section(options.write_doc, "matrix", f"{text}\n\n{provenance()}")
        shutil.copyfile(out / "matrix.png", options.write_doc.parent / IMAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
