#!/usr/bin/env bash
# The whole suite, four tests at a time. A machine that also does other work can make a test miss a clock of its own: the
# few that failed are run once more, alone. What fails again has failed; what then passes is named, to be made steadier.
set -euo pipefail
cd "$(dirname "$0")/.."
most=8
pytest=(.venv/bin/python -m pytest)
failed() { .venv/bin/python -c 'import json, pathlib
found = pathlib.Path(".pytest_cache/v/cache/lastfailed")
print("\n".join(json.loads(found.read_text())) if found.exists() else "")'; }

"${pytest[@]}" --cache-clear -n 4 --dist loadscope --no-loadscope-reorder --durations=15 "$@" && exit 0
code=$?
mapfile -t names < <(failed)
if [ "$code" != 1 ] || [ "${#names[@]}" -gt "$most" ] || [ -z "${names[0]:-}" ]; then exit "$code"; fi
printf '\nOnce more, alone:\n'
printf '  %s\n' "${names[@]}"
"${pytest[@]}" "${names[@]}"
printf '\nUnstable on this machine (failed among others, passed alone):\n'
printf '  %s\n' "${names[@]}"
