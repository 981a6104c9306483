#!/usr/bin/env bash
# One would expect that the word error rate of jiwer (4.0.0) takes a line end for the end of a word, as
# str.split does. It splits at spaces alone: "a\nb" is one word, and compared with "a b" two words are
# wrong for one, a rate of 2. Texts of pages, read in other lines than they are written, score as if
# words were wrong; join lines by spaces first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jiwer==4.0.0 2>/dev/null
"$folder/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import jiwer

print("jiwer", version("jiwer"))
rates = {
    "line end for a space": jiwer.wer("the two\nlines", "the two lines"),
    "two spaces for one": jiwer.wer("the two  lines", "the two lines"),
}
print(rates)
if rates != {"line end for a space": 1.0, "two spaces for one": 0.0}:
    sys.exit("the behaviour changed: a line end is counted in another way")
PYTHON
