#!/usr/bin/env bash
# Serve this engine: ./serve.sh [final|stock|ar|final-ar|reference] [PORT] [--host HOST]
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
. "$here/tools/python.sh"
exec "$python" "$here/tools/serve.py" "$@"
