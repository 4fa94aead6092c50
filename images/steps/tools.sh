#!/bin/sh
# usage: tools.sh [NATIVE]
# Build tools that no image keeps: a compiler for the stubs of slim_torch.py, pip, and with "yes" Rust for native/.
set -eu
packages="gcc libc6-dev python3-venv"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
if [ "${1:-no}" = yes ]; then
  # Debian 12's own Rust is too old. cargo-web is the one that builds its browsers, and follows their needs.
  if apt-cache show cargo-web >/dev/null 2>&1; then packages="$packages cargo-web"; else packages="$packages cargo"; fi
fi
# shellcheck disable=SC2086 # a list of packages
apt-get install -qq -y --no-install-recommends $packages >/dev/null
