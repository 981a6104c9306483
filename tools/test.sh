#!/usr/bin/env bash
# Lint, format check, type check and tests in the checkout's own .venv, which is set up on the first run.
#
#   bash tools/test.sh                     everything that runs by default
#   bash tools/test.sh -k resume -x        further arguments go to pytest
#   bash tools/test.sh -m heavy            what runs every night, see CONTRIBUTING.md
#
# PYTHON names the interpreter for .venv (3.10 or newer; default: the first found).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
ensure_environment cpu,dev

"$VENV_PYTHON" -m ruff check .
"$VENV_PYTHON" -m ruff format --check .
"$VENV_PYTHON" -m pyright
# Two workers with one thread each, so that they do not compete for the cores.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# A test file stays on one worker, because its tests share runs and launches of several ranks. Files
# come in their own order, with the long ones of several ranks first, so that both workers end
# together; without the option those with the fewest tests would come last.
exec "$VENV_PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
