#!/usr/bin/env bash
# usage: tools/test_programs.sh [PACKAGE ...]
# Installs Debian's packages of programs that tests use if they are there: all of them, or those named. Needs root.
# `make test` ends with the tests that were skipped without them (tests/support/skipped_tests.py).
set -euo pipefail
declare -A program_of=(
  [prometheus]=promtool [prometheus-pushgateway]=prometheus-pushgateway [chromium]=chromium [podman]=podman
  [g++]=g++ [binutils]=readelf [qemu-user]=qemu-aarch64
)
[ $# -gt 0 ] || set -- prometheus prometheus-pushgateway chromium podman g++ binutils qemu-user
missing=()
for package in "$@"; do
  command -v "${program_of[$package]:-$package}" >/dev/null || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "nothing to install: $* are there"
  exit
fi
command -v apt-get >/dev/null || { echo "no apt-get here: install ${missing[*]} in the way of this system" >&2; exit 1; }
[ "$(id -u)" = 0 ] || { echo "as root: apt-get install ${missing[*]}" >&2; exit 1; }
log=$(mktemp)
{ apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"; } \
  >"$log" 2>&1 || { tail -n 5 "$log" >&2; echo "could not install ${missing[*]}; the log is $log" >&2; exit 1; }
rm "$log"
echo "installed ${missing[*]}"
