#!/usr/bin/env bash
# Make .venv with the pinned packages, and build the engine's native parts.
# PYTHON: the interpreter to use (3.11 or newer). TORCH_INDEX: a further package index, if yours has no CPU build of torch.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
fail() {
    echo "error: $1" >&2
    echo "  what to do: $2" >&2
    exit 3
}
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

base=${PYTHON:-}
if [ -n "$base" ]; then
    command -v "$base" >/dev/null 2>&1 || fail "PYTHON=$base is not a program" "give the path of Python 3.11 or newer."
    new_enough "$base" || fail "PYTHON=$base is older than Python 3.11" "give a newer one."
else
    for name in python3.11 python3.12 python3.13 python3.14 python3; do
        if command -v "$name" >/dev/null 2>&1 && new_enough "$name"; then
            base=$name
            break
        fi
    done
    [ -n "$base" ] || fail "no Python 3.11 or newer found" "install one, or set PYTHON to its path."
fi

if [ -n "$(find "$here/engine" -name '*.cpp' -print -quit)" ]; then
    found=
    for name in ${CXX:-g++ clang++ c++}; do
        if command -v "$name" >/dev/null 2>&1; then found=$name; fi
    done
    [ -n "$found" ] || fail "no C++ compiler found, and this engine has native parts" "install g++, or set CXX."
fi

if [ ! -x "$here/.venv/bin/python" ] || ! "$here/.venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf -- "$here/.venv"
    if "$base" -c 'import ensurepip' 2>/dev/null; then
        "$base" -m venv "$here/.venv"
    elif "$base" -c 'import pip' 2>/dev/null; then
        "$base" -m venv --without-pip "$here/.venv"
        "$base" -m pip --python "$here/.venv/bin/python" install -q pip
    else
        fail "$base has neither ensurepip nor pip" "install its venv package (Debian: apt install python3-venv)."
    fi
fi
index=()
[ -z "${TORCH_INDEX:-}" ] || index=(--extra-index-url "$TORCH_INDEX")
"$here/.venv/bin/python" -m pip --disable-pip-version-check install -q ${index[@]+"${index[@]}"} -r "$here/requirements.txt" ||
    fail "the packages of requirements.txt could not be installed" "see pip's words above: network, disk space, or TORCH_INDEX."
python="$here/.venv/bin/python"
export PYTHONDONTWRITEBYTECODE=1
"$python" "$here/tools/warm.py"
echo "ready: ./download_models.sh, then ./serve.sh final 30000"
