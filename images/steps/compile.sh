#!/bin/sh
# usage: compile.sh SITE_PACKAGES
# Leaves out what no pod reads and compiles the rest, because the file system is read-only at run time. By hash and
# unchecked: with the time of a file in it, every build would be another one.
set -eu
cd "$1"
rm -rf torch/include torch/share/cmake torch/bin/protoc*
find . -type d \( -name test -o -name tests \) -prune -exec rm -rf {} +
find . -type f \( -name '*.a' -o -name '*.pxd' -o -name '*.pyi' \) -delete
PYTHONHASHSEED=0 python3 -m compileall -q -f -j 1 --invalidation-mode unchecked-hash . >/dev/null || true
