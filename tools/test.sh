#!/usr/bin/env bash
# Lint, format check, type check and tests in the checkout's own .venv, which is set up on the first run.
#
#   bash tools/test.sh                     everything that runs by default
#   bash tools/test.sh -k resume -x        further arguments go to pytest
#
# PYTHON names the interpreter for .venv (3.10 or newer; default: the first found).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
ensure_environment cpu,dev

"$VENV_PYTHON" -m ruff check .
"$VENV_PYTHON" -m ruff format --check .
"$VENV_PYTHON" -m pyright
# Two workers with one thread each: two workers with all threads each would fight for the cores.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# A file stays on one worker: its launches of several processes are shared by all of its tests.
exec "$VENV_PYTHON" -m pytest -n 2 --dist loadfile "$@"
