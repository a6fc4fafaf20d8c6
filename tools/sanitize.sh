#!/usr/bin/env bash
# Runs a reduced table of kernels under compute-sanitizer: memcheck and racecheck. Needs a GPU.
# Every tensor gets an allocation of its own, so that one byte past its end is noticed.
#   tools/sanitize.sh            all tools, all presets, JOBS processes side by side
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_NUM_THREADS=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
presets=$("$python" -c 'from tq_core import PRESETS; print(*PRESETS, sep="\n")')

each() { # command...: once for every preset, its name appended
    xargs -P "${JOBS:-9}" -I{} "$@" {} <<<"$presets"
}

echo "without a tool: compiles the kernels"
each "$python" -m tests.gpu.reduced
for tool in memcheck racecheck; do
    echo "$tool"
    each compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m tests.gpu.reduced
done
