#!/bin/sh
# Everything that needs a CUDA card, in one command: tests, then compute-sanitizer on small shapes.
set -e
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
PYTHON=${PYTHON:-python3}
"$PYTHON" -m pytest -q -m gpu -p no:cacheprovider tests/kernels/w12/test_gpu_kernels.py
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$PYTHON" experiments/w12/sanitize.py
  done
else
  echo "compute-sanitizer is not installed: not run"
fi
