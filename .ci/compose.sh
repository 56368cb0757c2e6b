#!/usr/bin/env bash
# docker compose for this project where the build can reach neither an image registry nor a package index by itself:
# the base image is ours, and this machine's pip, which knows its index and certificates, fetches the packages first.
#   .ci/compose.sh up -d      .ci/compose.sh down -v
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
if docker compose version >/dev/null 2>&1; then compose=(docker compose); else compose=(docker-compose); fi

TOOLCRIB_BASE=${TOOLCRIB_BASE:-toolcrib/base:$($python -c 'from importlib.metadata import version; print(version("toolcrib"))')}
export TOOLCRIB_BASE
export DOCKER_BUILDKIT=${DOCKER_BUILDKIT:-0} COMPOSE_DOCKER_CLI_BUILD=${COMPOSE_DOCKER_CLI_BUILD:-0}

if [[ " $* " == *" up "* || " $* " == *" build "* ]]; then
    $python - "$TOOLCRIB_BASE" build/wheels <<'PY'
import shutil, sys, tomllib
from pathlib import Path
from toolserver.images.build import ASK_PYTHON
from toolserver.images.engine import ImageEngine
from toolserver.images.wheels import download_wheels

base, into = sys.argv[1], Path(sys.argv[2])
project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))
needed = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["toolserver"]
with ImageEngine(None) as engine:
    python, machine = engine.run(base, ASK_PYTHON).split()
shutil.rmtree(into, ignore_errors=True)
into.mkdir(parents=True)
download_wheels([*needed, *project["build-system"]["requires"]], python, machine, into, Path("constraints.txt"))
PY
fi
exec "${compose[@]}" "$@"
