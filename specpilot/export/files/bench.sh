#!/usr/bin/env bash
# Measure the variants against each other on this machine: ./bench.sh [VARIANT ...] [--prompts N] [--tokens N] [--json]
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
. "$here/tools/python.sh"
exec "$python" "$here/tools/bench.py" "$@"
