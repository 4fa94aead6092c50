#!/bin/bash
# Continuous integration on a real Kubernetes, from nothing: builds its programs, checks the chart with the Helm among
# them, starts the cluster, builds the images, runs the tests marked cluster_ci and those of the images, cleans up.
#
# All of it ends by one deadline: CI_SECONDS after CI_STARTED (seconds since 1970; default: now). What has no time left,
# what takes longer than it may, and what this machine cannot carry (no root, no Go, no way to the Go modules or to
# Debian's packages), is NOT RUN to its end, with the reason, and no failure. Everything else is one; a test that hangs
# fails by its own time limit.
set -uo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
lab=("$python" -m tests.cluster.lab)
CANNOT=69 TIMED_OUT=124 LEAVING=60 # LEAVING: seconds to end the cluster in
deadline=$((${CI_STARTED:-$(date +%s)} + ${CI_SECONDS:-3000}))

not_run() { echo "$1: NOT RUN: $2" && exit 0; }

remaining() { echo $((deadline - LEAVING - $(date +%s))); }

enough() { # WHAT MINUTES: there is as much time left
  local left
  left=$(remaining)
  [ "$left" -ge $(($2 * 60)) ] || not_run "$1" "it takes $2 minutes, and $((left > 0 ? left / 60 : 0)) are left"
}

step() { # WHAT MINUTES COMMAND...: has that long, and fails as the command does
  local what=$1 minutes=$2
  shift 2
  enough "$what" "$minutes"
  timeout --kill-after=30 $((minutes * 60)) "$@"
  local status=$?
  case $status in
    0) ;;
    "$CANNOT") not_run "$what" "this machine cannot carry it (see above)" ;;
    "$TIMED_OUT") not_run "$what" "too slow: no end after $minutes minutes" ;;
    *) echo "$what: failed with $status" && exit 1 ;;
  esac
}

tests() { # WHAT MINUTES ARGUMENTS...
  step "$1" "$2" "$python" -m pytest -p no:cacheprovider --durations=10 "${@:3}"
}

# Compiling takes as long as the machine makes it, so it gets all but 26 minutes. The limits below add up to more than
# those: what finds less time left than its limit is not begun.
compile() {
  enough "cluster tests" 27
  timeout --kill-after=30 $(($(remaining) - 26 * 60)) "${lab[@]}" build
  local status=$?
  [ "$status" -ne "$TIMED_OUT" ] || not_run "cluster tests" "too slow: Kubernetes was not compiled in the time there is"
  [ "$status" -ne "$CANNOT" ] || not_run "cluster tests" "this machine cannot carry a cluster (see above)"
  [ "$status" -eq 0 ] || { echo "building the cluster's programs failed with $status" && exit 1; }
}

compile
tests "chart" 3 tests/chart
[ -e "$("${lab[@]}" kubeconfig)" ] || trap '"${lab[@]}" down >/dev/null' EXIT # one that was here before stays
step "the cluster" 5 "${lab[@]}" up
step "the images" 9 "${lab[@]}" images base tools
tests "cluster tests" 12 tests/cluster -m cluster_ci
tests "tests of the images" 6 tests/images -k "not two_builds" # that one builds all of them twice
