#!/usr/bin/env bash
# Runs the real `openai` client against the real program.
#
#   tests/e2e/run.sh [MODEL]
#
# MODEL is a file or a catalogue name (default smollm2:135m, which is pulled). Environment:
#   E2E_BIN     the program; else it is built in release mode
#   E2E_PYTHON  a Python with the packages of requirements.txt; else a venv is made
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
model=${1:-smollm2:135m}

if [ -z "${E2E_BIN:-}" ]; then
    (cd "$root" && cargo build --release -p dynalm)
    E2E_BIN=${CARGO_TARGET_DIR:-$root/target}/release/dynalm
fi
if [ -z "${E2E_PYTHON:-}" ]; then
    venv=$root/target/e2e-venv
    [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet -r "$here/requirements.txt"
    E2E_PYTHON=$venv/bin/python
fi

# The tests start and stop servers themselves: some need their own options, and one is about how a server ends.
export E2E_BIN E2E_MODEL=$model
exec "$E2E_PYTHON" -m pytest -q "$here" "${@:2}"
