# Sourced by the scripts beside it: sets `python`, the interpreter of this engine. ENGINE_PYTHON overrides it.
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
python=${ENGINE_PYTHON:-$here/.venv/bin/python}
wrong=
if ! command -v "$python" >/dev/null 2>&1 || [ -d "$python" ]; then
    wrong="is not a program"
elif ! new_enough "$python"; then
    wrong="is not Python 3.11 or newer"
fi
if [ -n "$wrong" ]; then
    if [ "${any_python:-no}" = yes ]; then
        for python in python3.14 python3.13 python3.12 python3.11 python3 ""; do
            [ -n "$python" ] && command -v "$python" >/dev/null 2>&1 && new_enough "$python" && break
        done
    else
        python=
    fi
    if [ -z "$python" ]; then
        if [ -n "${ENGINE_PYTHON:-}" ]; then
            echo "error: ENGINE_PYTHON=$ENGINE_PYTHON $wrong" >&2
        else
            echo "error: this engine has no Python environment yet" >&2
        fi
        echo "  what to do: run ./setup_env.sh first, or set ENGINE_PYTHON to an interpreter that has its packages." >&2
        exit 3
    fi
fi
export PYTHONDONTWRITEBYTECODE=1
