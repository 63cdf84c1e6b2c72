#!/usr/bin/env bash
# Fetch, check and convert the target's checkpoint into models/. TARGET_DIR names one that you have already.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
. "$here/tools/python.sh"
"$python" "$here/tools/download.py"
exec "$python" "$here/tools/warm.py"
