#!/bin/sh
# usage: compile.sh SITE_PACKAGES
# Compiles all Python, because the file system is read-only at run time. Bytecode is validated by an unchecked hash: with
# file times in it, builds would not be reproducible.
set -eu
cd "$1"
PYTHONHASHSEED=0 python3 -m compileall -q -f -j 1 --invalidation-mode unchecked-hash . >/dev/null || true
