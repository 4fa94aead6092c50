#!/bin/bash
# Continuous integration on a real Kubernetes, from scratch: builds Kubernetes and Helm, tests the chart, starts the
# cluster, builds the images, runs the tests marked cluster_ci and those of the images, and cleans up.
#
# Everything stops at one deadline: CI_SECONDS after CI_STARTED (unix seconds; default: now). A step is reported as NOT
# RUN, with the reason, if no time is left for it, if it exceeds its limit, or if this machine cannot run it (no root,
# no Go, no access to Go modules or Debian packages). This is not a failure. Any other error is. A test that hangs fails
# by its own time limit.
set -uo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
lab=("$python" -m tests.cluster.lab)
CANNOT=69 TIMED_OUT=124 LEAVING=60 # LEAVING: seconds to stop the cluster
deadline=$((${CI_STARTED:-$(date +%s)} + ${CI_SECONDS:-3000}))

not_run() { echo "$1: NOT RUN: $2" && exit 0; }

remaining() { echo $((deadline - LEAVING - $(date +%s))); }

enough() { # WHAT MINUTES: exits if less time is left
  local left
  left=$(remaining)
  [ "$left" -ge $(($2 * 60)) ] || not_run "$1" "it takes $2 minutes, and $((left > 0 ? left / 60 : 0)) are left"
}

step() { # WHAT MINUTES COMMAND...: runs the command with this limit, and fails if it fails
  local what=$1 minutes=$2
  shift 2
  enough "$what" "$minutes"
  timeout --kill-after=30 $((minutes * 60)) "$@"
  local status=$?
  case $status in
    0) ;;
    "$CANNOT") not_run "$what" "this machine cannot run it (see above)" ;;
    "$TIMED_OUT") not_run "$what" "too slow: not done after $minutes minutes" ;;
    *) echo "$what: failed with $status" && exit 1 ;;
  esac
}

tests() { # WHAT MINUTES ARGUMENTS...
  step "$1" "$2" "$python" -m pytest -p no:cacheprovider --durations=10 "${@:3}"
}

# Compiling takes longest and depends on the machine, so it gets all but 26 minutes. The limits of the steps below add
# up to more than 26 minutes. A step does not start if less time is left than its limit.
compile() {
  enough "cluster tests" 27
  timeout --kill-after=30 $(($(remaining) - 26 * 60)) "${lab[@]}" build
  local status=$?
  [ "$status" -ne "$TIMED_OUT" ] || not_run "cluster tests" "too slow: Kubernetes was not compiled in time"
  [ "$status" -ne "$CANNOT" ] || not_run "cluster tests" "this machine cannot run a cluster (see above)"
  [ "$status" -eq 0 ] || { echo "building the cluster's programs failed with $status" && exit 1; }
}

compile
tests "chart" 5 tests/chart
# A cluster that ran before keeps running.
[[ "$("${lab[@]}" status)" == *"running  kube-apiserver"* ]] || trap '"${lab[@]}" down >/dev/null' EXIT
step "the cluster" 5 "${lab[@]}" up
step "the images" 9 "${lab[@]}" images base tools
tests "cluster tests" 12 tests/cluster -m cluster_ci
tests "tests of the images" 6 tests/images -k "not two_builds" # that test builds all images twice
