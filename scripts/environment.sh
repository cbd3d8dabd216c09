# Sourced by the scripts beside it: makes .venv at the repository root and installs ptfast into it.
# shellcheck shell=bash

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
python=$venv/bin/python
busy=$root/.venv-busy # holds the process that is installing; left behind only by one that was killed

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

# quietly MESSAGE COMMAND...: show only the message and how long it takes, and the command's output if it fails.
quietly() {
    local message=$1 output ticker="" start=$SECONDS code=0 columns
    shift
    # A line that the terminal breaks would be printed anew each second.
    columns=$(stty size <&2 2>/dev/null | cut -d' ' -f2) || true
    [ "${columns:-0}" -lt 40 ] || message=${message:0:columns-16}
    printf '%s ' "$message" >&2
    if [ -t 2 ]; then
        while kill -0 $$ 2>/dev/null; do
            printf '\r%s %d s ' "$message" $((SECONDS - start)) >&2
            sleep 1
        done &
        ticker=$!
    fi
    output=$("$@" 2>&1) || code=$?
    if [ -n "$ticker" ]; then
        kill "$ticker" 2>/dev/null || true
        wait "$ticker" 2>/dev/null || true
        printf '\r%s ' "$message" >&2
    fi
    if [ "$code" -ne 0 ]; then
        say "failed after $((SECONDS - start)) s:"
        say "$output"
        rm -f "$busy"
        return 1
    fi
    say "done in $((SECONDS - start)) s"
}

make_venv() {
    local base
    base=$(find_python) || { code=$?; rm -f "$busy"; exit "$code"; }
    quietly "Making .venv ..." "$base" -E -m venv "$venv" ||
        die "$base cannot make a virtual environment (Debian and Ubuntu: apt install python3-venv)"
}

pip_install() (
    cd "$root"
    "$python" -E -m pip install -q --disable-pip-version-check --no-input -e ".$1"
)

# install_ptfast EXTRAS, such as "[test]": make .venv unless there is one that works, and install ptfast into it
# unless that has been done for this pyproject.toml already.
install_ptfast() {
    local extras=$1 stamp=$venv/.ptfast-installed$1 wanted interrupted=""
    wanted="$root
$(cat "$root/pyproject.toml")"
    if [ -f "$busy" ]; then
        ! kill -0 "$(cat "$busy")" 2>/dev/null || die "process $(cat "$busy") is installing into .venv; wait for it"
        say "The last installation was interrupted: starting over."
        interrupted=yes
        rm -f "$busy"
    elif [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && is_recent "$python"; then
        return
    fi

    (set -o noclobber && echo $$ >"$busy") 2>/dev/null || die "cannot write $busy, or another installation has begun"
    trap 'exit 130' INT
    trap 'exit 143' TERM
    if [ -n "$interrupted" ] || ! "$python" -c '' 2>/dev/null; then rm -rf "$venv"; fi
    "$python" -c 'import pip' 2>/dev/null || make_venv
    quietly "Installing ptfast$extras into .venv, minutes the first time ..." \
        pip_install "$extras" || die "pip could not install ptfast$extras; its output is above"
    printf '%s\n' "$wanted" >"$stamp"
    rm -f "$busy"
    trap - INT TERM
}
