#!/usr/bin/env bash
# usage: tools/lock.sh [--upgrade]
# Writes requirements/{build,run,dev}.txt from pyproject.toml: names, versions and hashes for every platform, and no
# index address. Needs uv, from the development set or the PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=.venv/bin/uv
[ -x "$uv" ] || uv=$(command -v uv) || { echo "uv is needed: run 'make .venv/.dev' first, or install uv" >&2; exit 2; }

compile() {
  "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url \
    --no-header --output-file "$@"
}
upgrade=("$@")
compile requirements/build.txt requirements/build.in "${upgrade[@]}"
compile requirements/run.txt --extra torch --extra gpu --extra cluster pyproject.toml "${upgrade[@]}"
compile requirements/dev.txt --extra torch --extra gpu --extra cluster --extra dev --constraint requirements/run.txt \
  pyproject.toml "${upgrade[@]}"
