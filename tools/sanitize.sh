#!/usr/bin/env bash
# Runs a reduced table of kernels under compute-sanitizer: memcheck and racecheck. Needs a GPU.
# Every tensor gets an allocation of its own, so that one byte past its end is noticed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
echo "without a tool: compiles the kernels"
"$python" -m tests.gpu.reduced
for tool in memcheck racecheck; do
    echo "$tool"
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m tests.gpu.reduced
done
