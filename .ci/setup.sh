#!/usr/bin/env bash
# Makes .venv with the project and the extras named as arguments; quick when nothing changed.
#   .ci/setup.sh toolserver,agent,sandbox
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:?which extras, such as dev}
python=${PYTHON:-python3}

say() { printf '%s\n' "$*" >&2; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    say "Toolcrib needs Python 3.11 or newer; '$python' is $("$python" --version 2>&1 || echo missing). Set PYTHON=/path/to/python3.11."
    exit 2
}

want=$(cat pyproject.toml constraints.txt "$0" | sha256sum | cut -d' ' -f1)
stamp=".venv/installed-$extras"
[ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$want" ] && exit 0

if ! [ -x .venv/bin/pip ]; then
    rm -rf .venv
    if ! "$python" -m venv .venv >/dev/null 2>&1; then
        rm -rf .venv
        if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
            say "Installing Debian's python3-venv, which this Python lacks"
            apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null 2>&1
            "$python" -m venv .venv
        else
            say "'$python -m venv' does not work here. On Debian: apt-get install python3-venv"
            exit 2
        fi
    fi
fi
say "Installing toolcrib[$extras] into .venv"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]" 2> >(grep -v '^WARNING: Location' >&2)
printf '%s' "$want" > "$stamp"
