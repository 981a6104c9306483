# Sets up the checkout's virtual environment; the scripts in this folder source this file.
#
#   ensure_environment EXTRAS    e.g. ensure_environment cpu,dev
#
# Creates .venv in the checkout when it is absent and installs `paddle-vl[EXTRAS]` into it, editable,
# when pyproject.toml changed since the last time. PYTHON names the interpreter to use.
# Afterwards VENV_PYTHON is the environment's interpreter.

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$REPOSITORY/.venv"
VENV_PYTHON="$VENV/bin/python"

# Same as requires-python in pyproject.toml: the versions that Paddle has wheels for.
PYTHON_VERSIONS="3.10 to 3.13"

_is_fitting_python() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' >/dev/null 2>&1
}

_version_of() {
    "$1" --version 2>/dev/null || echo "absent"
}

_find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        _is_fitting_python "$PYTHON" && { echo "$PYTHON"; return; }
        echo "PYTHON=$PYTHON is $(_version_of "$PYTHON"), and Paddle has wheels for Python" \
            "$PYTHON_VERSIONS: name one of these" >&2
        return 1
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
        _is_fitting_python "$candidate" && { echo "$candidate"; return; }
    done
    echo "no Python $PYTHON_VERSIONS found, for which Paddle has wheels (python3 is" \
        "$(_version_of python3)); install one (uv python install 3.12, conda create python=3.12)" \
        "and name it: PYTHON=/path/to/python bash $0" >&2
    return 1
}

ensure_environment() {
    local extras=$1 python stamp state
    if ! _is_fitting_python "$VENV_PYTHON" || ! "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
        python=$(_find_python) || return 1
        echo "creating $VENV with $("$python" --version)"
        if ! "$python" -m venv --clear "$VENV"; then
            echo "$python cannot create a virtual environment (on Debian and Ubuntu: apt-get" \
                "install python3-venv)" >&2
            return 1
        fi
    fi
    stamp="$VENV/installed-$extras"
    state=$(cksum <"$REPOSITORY/pyproject.toml")
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$state" ]; then
        echo "installing paddle-vl[$extras] into $VENV"
        "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check \
            -e "$REPOSITORY[$extras]" || return 1
        echo "$state" >"$stamp"
    fi
}
