#!/bin/bash
# Runs the GPU tests, then the sweep of `podscale bench train`, within LIMIT seconds. Results are written to OUT after
# every row, so an interrupted session keeps them, and the next session continues.
#
#   tools/gpu_session.sh
#   OUT=/tmp/found LIMIT=590 PYTHON=python3 WHEELS=wheels IMAGES=photos.tar tools/gpu_session.sh
#
# PYTHON: interpreter with torch and torchvision.
# WHEELS: folder of wheels for the other packages (PACKAGES below), for machines without a package index. Fill it
#   elsewhere: tools/gpu_session.sh download FOLDER --python-version 3.12
# IMAGES: archive or folder of JPEGs, for the rows with real images.
# TESTS=0: skip the tests.
# REHEARSE=1: go on if something is missing, for example a GPU.
# SWEEP: series of the sweep, default gpu.
# Further arguments go to `podscale bench train`.
set -u
cd "$(dirname "$0")/.."
# What `podscale bench train`, `podscale doctor` and the tests import, beside torch and torchvision with their own
# dependencies. tests/repository/test_gpu_session.py checks it.
PACKAGES='annotated-doc annotated-types fsspec iniconfig markdown-it-py mdurl numpy packaging pillow pluggy
  prometheus-client pydantic pydantic-core pygments pytest pyyaml rich safetensors shellingham simplejpeg typer
  typing-inspection xxhash'
if [ "${1:-}" = download ]; then
  # shellcheck disable=SC2086 # words
  # Each platform is named, because pip takes wheels of exactly these.
  exec "${PYTHON:-python3}" -m pip download -q --no-deps --only-binary :all: --dest "$2" "${@:3}" \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 $PACKAGES
fi
OUT=${OUT:-benchmarks/results} LIMIT=${LIMIT:-590} PYTHON=${PYTHON:-python3} TESTS=${TESTS:-1} SWEEP=${SWEEP:-gpu}
SECONDS=0
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/podscale-inductor}
export PYTHONPATH=${PYTHONPATH:-}
if [ -n "${WHEELS:-}" ]; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/podscale-site \
    --upgrade "$WHEELS"/*.whl || exit 1
  PYTHONPATH=/tmp/podscale-site:$PYTHONPATH
fi
# Without an installation, these links provide `podscale.pipelines` and `podscale.components` (see setup.py).
if ! "$PYTHON" -c 'import podscale.pipelines' 2>/dev/null; then
  links=/tmp/podscale-tree
  rm -rf "$links" && mkdir -p "$links" && cp -r podscale "$links/podscale"
  ln -s "$PWD/pipelines" "$links/podscale/pipelines" && ln -s "$PWD/components" "$links/podscale/components"
  PYTHONPATH=$links:$PYTHONPATH
fi
export PYTHONPATH=${PYTHONPATH%:}

# What is missing first, by name: a session without it finds little.
# shellcheck disable=SC2086 # words
"$PYTHON" tools/gpu_session_checks.py "$OUT" $PACKAGES 2>&1 | tee "$OUT/gpu-checks.txt"
if [ "${PIPESTATUS[0]}" != 0 ] && [ "${REHEARSE:-}" != 1 ]; then exit 2; fi
podscale() { PYTHONSAFEPATH=1 "$PYTHON" -m podscale "$@"; }
left() { echo $((LIMIT - SECONDS)); }

# Compilers, headers, driver and memory first: a session without them finds little.
podscale doctor --workspace "$OUT" | tee "$OUT/gpu-doctor.txt"

# Each file in its own process, because a CUDA error breaks all later tests of a process. SIGINT at the limit, so that
# pytest still prints its summary. Without the project's pytest settings, which need plugins that may be missing.
tests() { # usage: tests SECONDS EXPRESSION
  local end=$((SECONDS + $1)) file limit
  for file in tests/gpu/test_*.py; do
    limit=$((end - SECONDS))
    [ "$limit" -gt 10 ] || { echo "$file: no time left" | tee -a "$OUT/gpu-tests.txt"; continue; }
    PYTHONPATH=$PWD:$PYTHONPATH timeout --signal INT --kill-after 20 "$((limit < 300 ? limit : 300))" \
      "$PYTHON" -m pytest -c /dev/null --rootdir "$PWD" --import-mode=importlib -p no:cacheprovider -W ignore -m gpu \
      "$file" -q -rfE --durations=5 -k "$2" 2>&1 | tee -a "$OUT/gpu-tests.txt"
  done
}
if [ "$TESTS" != 0 ]; then
  : >"$OUT/gpu-tests.txt"
  # The compiler's tests run last, because they take longest and the sweep compiles too. So do ranks that share the GPU.
  tests 200 'not compiled and not nccl'
fi
real=()
if [ -n "${IMAGES:-}" ]; then
  place=/tmp/podscale-images
  podscale shard --set data.source="$(realpath "$IMAGES")" --set run.workspace=$place --set input.image_size=224 &&
    real=(--shard-set "$(ls -d $place/datasets/*/ | head -1)")
fi
podscale bench train --sweep "$SWEEP" --budget "$(left)" --time-limit 300 --out "$OUT" ${real[@]+"${real[@]}"} "$@"
if [ "$TESTS" != 0 ] && [ "$(left)" -gt 60 ]; then tests "$(left)" 'compiled or nccl'; fi
