#!/usr/bin/env bash
# What only a GPU can show: tests, sanitizer, benchmarks. Results and logs go to a folder.
#   tools/gpu.sh FOLDER [step ...]     steps: tests sanitize decode calibrated ragged chunk store mixed launch model
#                                      fit generate model-jax frameworks
# PYTHON names the interpreter, JOBS the processes side by side, COMMIT what is written into results.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:?usage: tools/gpu.sh FOLDER [step ...]}
shift
steps=("$@")
[[ $# -gt 0 ]] || steps=(tests sanitize decode calibrated ragged chunk store mixed launch model fit generate model-jax frameworks)
python=${PYTHON:-python3}
jobs=${JOBS:-14}
commit=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
mkdir -p "$folder"

bench() { # subcommand, arguments
    "$python" -m bench "$@" --csv "$folder/$1.csv" --commit "$commit"
}

run() {
    case $1 in
    tests) "$python" -m pytest -q -p no:benchmark -m gpu -n "$jobs" tests/gpu tests/parity tests/torch \
        tests/hf/test_gpu.py ;;
    sanitize) tools/sanitize.sh ;;
    decode) bench decode --grid --check --jobs "$jobs" ;;
    chunk) bench chunk --jobs "$jobs" ;;
    fit) bench model --fit --jobs "$jobs" ;;
    generate) bench model --generate 64 --jobs "$jobs" ;;
    model-jax) bench model --jax ;;
    calibrated | store | ragged | mixed | launch | model | frameworks) bench "$1" ;;
    *) echo "tools/gpu.sh: no step $1" >&2 && return 2 ;;
    esac
}

failed=()
for step in "${steps[@]}"; do
    echo "== $step"
    run "$step" 2>&1 | tee "$folder/$step.log" || failed+=("$step")
done
[[ ${#failed[@]} -eq 0 ]] || { echo "failed: ${failed[*]}"; exit 1; }
