#!/bin/sh
# Make the virtual environment that the Makefile's targets use.
#
#   VENV    where it goes (default .venv)
#   PYTHON  the Python 3.12 to make it with (default: looked for)
#
# Does nothing when the environment already holds what requirements/ asks for. A stamp file in
# the environment remembers the checksum of everything that decides its contents.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
venv=${VENV:-.venv}
stamp=$venv/.sparetrain-setup
need_kib=8000000 # torch with its CUDA libraries takes 5.1 GB, its downloads the rest

fail() {
    printf '\nsetup: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '       %s\n' "$line" >&2; done
    exit 1
}

# A name on the PATH proves nothing: pyenv's shims exist for versions that are not selected and
# fail when called. So every candidate is run, and asked for the real executable behind it.
real_python() {
    "$1" -c 'import sys
if sys.version_info[:2] == (3, 12):
    print(sys.executable)' 2>/dev/null || true
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        real_python "$PYTHON"
        return
    fi
    for candidate in python3.12 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 \
        /usr/local/bin/python3.12 /usr/bin/python3.12 /opt/homebrew/bin/python3.12; do
        found=$(real_python "$candidate")
        if [ -n "$found" ]; then
            printf '%s\n' "$found"
            return
        fi
    done
    # pyenv that keeps its versions somewhere else
    if command -v pyenv >/dev/null 2>&1; then
        for version in $(pyenv versions --bare 2>/dev/null | grep '^3\.12' || true); do
            found=$(real_python "$(pyenv prefix "$version" 2>/dev/null)/bin/python3.12")
            if [ -n "$found" ]; then
                printf '%s\n' "$found"
                return
            fi
        done
    fi
}

# setup.cfg and the checkout's place count too: the package is installed in editable mode.
wanted=$({ pwd; cat requirements/*.txt setup.cfg pyproject.toml; } | cksum)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    if [ -z "$python" ]; then
        if [ -n "${PYTHON:-}" ]; then
            fail "PYTHON=$PYTHON is not a Python 3.12 that runs." "Unset it to have one looked for."
        fi
        fail "no Python 3.12 found." \
            "Looked at python3.12, python3 and python on the PATH, and at pyenv's versions." \
            "Install one (for instance: pyenv install 3.12) or name it: make setup PYTHON=/path/to/python3.12"
    fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null || fail \
        "$python has no venv module with pip." \
        "On Debian and Ubuntu it is a package of its own: apt-get install python3.12-venv"
    echo "setup: making $venv with $python"
    "$python" -m venv "$venv" || fail "could not make the virtual environment $venv."
fi
[ -n "$(real_python "$venv/bin/python")" ] || fail \
    "$venv is not an environment of Python 3.12." \
    "Remove it, or choose another place: make setup VENV=/path"

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    free_kib=$(df -Pk "$venv" | awk 'NR == 2 { print $4 }')
    [ "$free_kib" -ge "$need_kib" ] || fail \
        "too little disk: $((free_kib / 1000000)) GB free at $venv, $((need_kib / 1000000)) GB needed." \
        "Choose another place: make setup VENV=/path"
fi

log=$venv/setup.log
echo "setup: installing pinned versions into $venv (some minutes and 5 GB the first time)"
if ! {
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
        -r requirements/develop.txt &&
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
        --no-deps --no-build-isolation -e .
} >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    if grep -qiE 'no space left|errno 28' "$log"; then
        fail "the disk is full." "Choose another place: make setup VENV=/path; the whole log: $log"
    fi
    if grep -qiE 'connection|timed out|name resolution|proxy|ssl|retrying' "$log"; then
        fail "the package index could not be reached." \
            "Installing needs a network (or a mirror that pip is configured for) once." \
            "The whole log: $log"
    fi
    fail "pip could not install the pinned versions." \
        "They are for Linux x86-64; see requirements/constraints.txt. The whole log: $log"
fi
printf '%s\n' "$wanted" >"$stamp"
echo "setup: done"
