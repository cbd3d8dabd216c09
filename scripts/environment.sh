# Sourced by the scripts beside it: makes .venv at the repository root and installs ptfast into it.
# shellcheck shell=bash

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
python=$venv/bin/python

# Variables of the caller that would make this environment import another one's packages.
unset PYTHONHOME PYTHONPATH

say() { printf '%s\n' "$*" >&2; }

die() {
    say "$(basename "$0"): $*"
    exit 4
}

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

# Print a Python >= 3.10: $PYTHON if that is set, else the first one on the PATH.
find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_recent "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.10 or newer"
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
        if is_recent "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python 3.10 or newer on the PATH. Install one, or name it: PYTHON=/path/to/python3 $0"
}

# Run a command with its output kept in a file, shown only if the command fails; on a terminal count the seconds.
quietly() {
    local message=$1 log=$2 ticker="" start=$SECONDS code=0
    shift 2
    if [ -t 2 ]; then
        (while :; do printf '\r%s %d s ' "$message" $((SECONDS - start)) >&2; sleep 1; done) &
        ticker=$!
        # shellcheck disable=SC2064
        trap "kill $ticker 2>/dev/null || true" EXIT
    else
        say "$message"
    fi
    "$@" >"$log" 2>&1 || code=$?
    if [ -n "$ticker" ]; then
        kill "$ticker" 2>/dev/null || true
        wait "$ticker" 2>/dev/null || true
        trap - EXIT
        printf '\r' >&2
    fi
    if [ "$code" -ne 0 ]; then
        cat "$log" >&2
        return "$code"
    fi
    say "$message done in $((SECONDS - start)) s"
}

# Make .venv if there is none that works, and install ptfast with the given extras (such as "[test]") unless
# that has been done for this pyproject.toml already.
install_ptfast() {
    local extras=$1 stamp=$venv/.ptfast-installed$1 busy=$venv/.ptfast-installing log=$venv/install.log
    local wanted interrupted="" base clear=""
    wanted=$(printf '%s\n' "$root" && cat "$root/pyproject.toml")
    if [ -f "$busy" ]; then
        # Only an installation that was killed leaves this file; what it left behind cannot be trusted.
        ! kill -0 "$(cat "$busy")" 2>/dev/null ||
            die "another installation into .venv is running (process $(cat "$busy")). Wait until it is done"
        interrupted=yes
    elif [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && is_recent "$python"; then
        return
    fi

    if [ -n "$interrupted" ] || ! "$python" -c 'import pip' >/dev/null 2>&1; then
        base=$(find_python)
        if [ -n "$interrupted" ] || ! "$python" -c '' >/dev/null 2>&1; then clear=--clear; fi
        mkdir -p "$venv"
        quietly "Making .venv ..." "$root/.venv-log" "$base" -m venv $clear "$venv" ||
            die "could not make a virtual environment with $base (on Debian and Ubuntu: apt install python3-venv)"
        rm -f "$root/.venv-log"
    fi
    is_recent "$python" || die "the Python of .venv is older than 3.10. Remove the folder .venv and run this again"
    echo $$ >"$busy"
    quietly "Installing ptfast$extras into .venv (PyTorch is some gigabytes: minutes the first time) ..." "$log" \
        install_editable "$extras" || {
        code=$?
        [ "$code" -ge 128 ] || rm -f "$busy"
        die "pip could not install ptfast$extras; its output is above"
    }
    rm -f "$busy"
    printf '%s\n' "$wanted" >"$stamp"
}

install_editable() (
    cd "$root" && exec "$python" -m pip install --disable-pip-version-check --no-input -q -e ".$1"
)
