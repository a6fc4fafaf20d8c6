#!/usr/bin/env bash
# Lowers tq_jax's kernels for a GPU that need not be there, in an environment of its own: jax-triton
# needs versions of Python, JAX and Triton that others do not.
#   tools/lowering.sh [pytest arguments]   exits 77 where there is no Python 3.12
# PYTHON312 names the interpreter, VENV_LOWERING the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV_LOWERING:-.venv-lowering}
old=$venv/jax-triton-0.3.1

find_python() {
    local candidate
    for candidate in "${PYTHON312:-}" python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "test-lowering: not run, it needs Python 3.12 and finds none; PYTHON312=/path/to/python3.12 names one" >&2
    exit 77
}

python=$(find_python) || exit 77
if [[ tools/requirements-lowering.txt -nt $venv/.ready || tools/lowering.sh -nt $venv/.ready ]]; then
    "$python" -m venv --clear "$venv"
    pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check install)
    "${pip[@]}" --requirement tools/requirements-lowering.txt
    version=$("$venv/bin/python" -c 'import jax; print(jax.__version__)')
    "${pip[@]}" --no-deps "jax-cuda13-plugin==$version"
    "${pip[@]}" --no-deps --target "$old" jax-triton==0.3.1
    touch "$venv/.ready"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} JAX_PLATFORMS=cpu
run=("$venv/bin/python" -m pytest -n auto --maxprocesses 8 tests/lowering "$@")
"${run[@]}"
# Of the release before, which orders everything otherwise, fewer cases.
PYTHONPATH="$old${PYTHONPATH:+:$PYTHONPATH}" "${run[@]}"
