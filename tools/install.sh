#!/usr/bin/env bash
# usage: tools/install.sh run|dev|docs|wheels|oldest
# Installs the hash-pinned requirements/<set>.txt and the package itself (editable) into .venv, and the set oldest into
# .venv-oldest. Used by the Makefile.
set -euo pipefail
cd "$(dirname "$0")/.."
set_name=$1
environment=.venv
if [ "$set_name" = oldest ]; then environment=.venv-oldest; fi
python=$environment/bin/python
log=$environment/install.log

size="a few GB"
if [ "$set_name" = docs ]; then size="about 100 MB"; fi
if [ "$set_name" = wheels ]; then size="about 400 MB"; fi
echo "installing requirements/$set_name.txt ($size on the first run; log: $log)"
{
  "$python" -m pip install --require-hashes --no-deps --progress-bar off -r requirements/build.txt
  "$python" -m pip install --require-hashes --no-deps --progress-bar off -r "requirements/$set_name.txt"
  # The build tools are installed above from pinned files. Only cargo may download: the locked crates of native/.
  "$python" -m pip install --no-deps --no-build-isolation --progress-bar off --editable .
} >"$log" 2>&1 || { tail -n 25 "$log" >&2; echo "installation failed. The full log is in $log" >&2; exit 1; }
touch "$environment/.$set_name"
# The development set contains everything that a run and the site need.
if [ "$set_name" = dev ]; then touch .venv/.run .venv/.docs; fi
