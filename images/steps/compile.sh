#!/bin/sh
# usage: compile.sh SITE_PACKAGES
# Compiles all Python, because the file system is read-only at run time. By hash and unchecked: with the time of a file
# in it, every build would be another one.
set -eu
cd "$1"
PYTHONHASHSEED=0 python3 -m compileall -q -f -j 1 --invalidation-mode unchecked-hash . >/dev/null || true
