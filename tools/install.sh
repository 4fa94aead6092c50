#!/usr/bin/env bash
# usage: tools/install.sh run|dev
# Installs the hash-pinned requirements/<set>.txt and the package itself (editable) into .venv. Used by the Makefile.
set -euo pipefail
cd "$(dirname "$0")/.."
set_name=$1
python=.venv/bin/python
log=.venv/install.log

echo "installing requirements/$set_name.txt (a few GB on the first run; log: $log)"
{
  "$python" -m pip install --require-hashes --no-deps --progress-bar off -r requirements/build.txt
  "$python" -m pip install --require-hashes --no-deps --progress-bar off -r "requirements/$set_name.txt"
  # The build tools are installed above from pinned files, so building the package downloads nothing.
  "$python" -m pip install --no-deps --no-build-isolation --progress-bar off --editable .
} >"$log" 2>&1 || { tail -n 25 "$log" >&2; echo "installation failed. The full log is in $log" >&2; exit 1; }
touch ".venv/.$set_name"
# The development set contains everything that a run needs.
if [ "$set_name" = dev ]; then touch .venv/.run; fi
