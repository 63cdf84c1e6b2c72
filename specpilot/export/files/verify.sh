#!/usr/bin/env bash
# Re-check the evidence on this machine: ./verify.sh [--checksums] [--expect SHA256] [--prompts N] [--tokens N]
# Exit code 0: everything holds; 8: a file was changed; 7: a token is not what the target would emit.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
for word in "$@"; do
    [ "$word" = --checksums ] && any_python=yes   # the files can be checked before the environment is there
done
. "$here/tools/python.sh"
exec "$python" "$here/tools/verify.py" "$@"
