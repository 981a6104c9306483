#!/usr/bin/env bash
# One would expect that an int64 tensor times a Python integer is a product of whole numbers, as in
# NumPy and torch. In Paddle 3.3.1 operators round the integer to float64 first: beyond 2^53 `x * n`,
# `x + n` and `full_like` take its neighbour, without a message. `x * paddle.to_tensor(n)` and
# `full` are exact. Hashes with large multipliers are silently others.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3.11 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install -q paddlepaddle==3.3.1 "numpy<2.4" setuptools
"$work/venv/bin/python" - <<'PYTHON' 2>"$work/log" || { tail -3 "$work/log"; exit 1; }
import sys

import paddle

print("paddle", paddle.__version__)
n = 2**53 + 1
x = paddle.to_tensor([3], dtype="int64")
found = {
    "x * n": x * n - 3 * paddle.to_tensor(n),
    "x + n": x + n - (x + paddle.to_tensor(n)),
    "full_like(x, n)": paddle.full_like(x, n) - paddle.to_tensor(n),
    "full([1], n)": paddle.full([1], n, "int64") - paddle.to_tensor(n),
}
errors = {name: int(error) for name, error in found.items()}
print("differ from the exact ones by:", errors)
if list(errors.values()) != [-3, -1, -1, 0]:
    sys.exit("the behaviour changed: Python integers are rounded in another way")
PYTHON
