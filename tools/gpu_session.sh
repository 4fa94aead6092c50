#!/bin/bash
# Runs the GPU tests, then the sweep of `podscale bench train`, within LIMIT seconds. Results are written to OUT after
# every test file and every row, so an interrupted session keeps them. The next session continues: it leaves out the files
# that ended by themselves, failed tests included, and the rows. Remove OUT/gpu-tests to run all files again.
#
#   tools/gpu_session.sh
#   OUT=/tmp/found LIMIT=590 PYTHON=python3 WHEELS=wheels IMAGES=photos.tar tools/gpu_session.sh
#
# PYTHON: interpreter with torch and torchvision.
# WHEELS: folder of wheels for the other packages (PACKAGES below), for machines without a package index. Fill it
#   elsewhere: tools/gpu_session.sh download FOLDER --python-version 3.12
# IMAGES: archive or folder of JPEGs, for the rows with real images and the rates of the loaders.
# TESTS=0: skip the tests. TEST_LIMIT: seconds of all tests. JOBS: test files side by side.
# NCU=0: skip the bytes of each kernel, which need NVIDIA's ncu.
# REHEARSE=1: go on if something is missing, for example a GPU.
# SWEEP: series of the sweep, default gpu.
# TMPDIR: folder of all that is not a result, default /tmp. Two sessions on one machine need two.
# TORCHINDUCTOR_CACHE_DIR: the compiler's cache, default OUT/gpu-inductor. Keep it for the next session: max-autotune takes
#   minutes without it. It is not filled beside the tests, because it would choose kernels by times on a busy GPU.
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
TEST_LIMIT=${TEST_LIMIT:-250} JOBS=${JOBS:-$((($(nproc) + 1) / 2))} NCU=${NCU:-1}
SECONDS=0
export TMPDIR=${TMPDIR:-/tmp}
mkdir -p "$OUT" "$TMPDIR"
export PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$(realpath "$OUT")/gpu-inductor}
export PYTHONPATH=${PYTHONPATH:-}
if [ -n "${WHEELS:-}" ]; then
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$TMPDIR/podscale-site" \
    --upgrade "$WHEELS"/*.whl || exit 1
  PYTHONPATH=$TMPDIR/podscale-site:$PYTHONPATH
fi
# Without an installation, these links provide `podscale.pipelines` and `podscale.components` (see setup.py).
if ! "$PYTHON" -c 'import podscale.pipelines' 2>/dev/null; then
  links=$TMPDIR/podscale-tree
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

# The machine as the program sees it: compilers, headers, driver.
podscale doctor --workspace "$OUT" | tee "$OUT/gpu-doctor.txt"

# Each file in its own process, because a CUDA error breaks all later tests of a process; the files side by side. SIGINT
# at the limit, so that pytest still prints its summary. Without the project's pytest settings, which need plugins that
# may be missing.
run_test_file() { # usage: run_test_file SECONDS FILE; writes OUT/gpu-tests/NAME.txt, or NAME.cut.txt at the limit
  local log=$OUT/gpu-tests/$(basename "$2" .py) code
  if [ -e "$log.txt" ]; then return; fi # it ended in an earlier session
  PYTHONPATH=$PWD:$PYTHONPATH timeout --signal INT --kill-after 30 "$1" \
    "$PYTHON" -m pytest -c /dev/null --rootdir "$PWD" --import-mode=importlib -p no:cacheprovider -W ignore -m gpu \
    "$2" -q -rfE --durations=5 >"$log.part" 2>&1 </dev/null
  code=$?
  rm -f "$log.cut.txt"
  if [ "$code" = 124 ] || [ "$code" = 137 ]; then mv "$log.part" "$log.cut.txt"; else mv "$log.part" "$log.txt"; fi
  cat "$OUT"/gpu-tests/*.txt >"$log.all" && mv "$log.all" "$OUT/gpu-tests.txt"
}
tests() { # usage: tests SECONDS
  local file
  mkdir -p "$OUT/gpu-tests"
  export -f run_test_file && export PYTHON OUT
  for file in tests/gpu/test_*.py; do
    printf '%s\0%s\0' "$1" "$file"
  done | xargs -0 -n 2 -P "$JOBS" bash -c 'run_test_file "$@"' run_test_file
  grep -E ' (passed|failed|skipped|error)|^(FAILED|ERROR)' "$OUT/gpu-tests.txt"
}
# The digits through all stages, by each engine.
runs() { # usage: runs SECONDS
  local engine stage
  for engine in pytorch jax; do
    for stage in shard train evaluate report; do
      XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONSAFEPATH=1 timeout "$1" "$PYTHON" -m podscale "$stage" \
        --set "run.workspace=$TMPDIR/podscale-runs-$engine" --set launch.processes=1 --set "train.engine=$engine" ||
        { echo "podscale $stage: exit code $? ($engine; 124 at the limit of $1 s)" && break; }
    done >"$OUT/gpu-run-$engine.txt" 2>&1 &
  done
  wait
}
# Results of tests and runs do not depend on time, so the compiler fills its cache beside them: rows that are timed
# after them start at once.
if [ "$TESTS" != 0 ]; then
  mkdir -p "$TMPDIR/podscale-warm"
  podscale bench train --set train.cuda_graph=true --set train.compile=default --vary batch=256 --vary \
    train.stem_compute=plain,space_to_depth --warmup 5 --steps 2 --parts 1 --budget "$TEST_LIMIT" \
    --out "$TMPDIR/podscale-warm" >"$TMPDIR/podscale-warm/log.txt" 2>&1 &
  warm=$!
  runs "$TEST_LIMIT" &
  whole=$!
  tests "$TEST_LIMIT"
  wait "$warm" "$whole"
  grep -hE '^top-1|^podscale' "$OUT"/gpu-run-*.txt
fi
real=()
if [ -n "${IMAGES:-}" ]; then
  place=$TMPDIR/podscale-images
  podscale shard --set data.source="$(realpath "$IMAGES")" --set run.workspace="$place" --set input.image_size=224 &&
    real=(--shard-set "$(ls -d "$place"/datasets/*/ | head -1)")
fi
reserve=0 input=0
if [ "$NCU" != 0 ] && command -v ncu >/dev/null; then reserve=100; fi
if [ -n "${IMAGES:-}" ]; then input=60; fi
budget=$(($(left) - reserve - input))
if [ "$budget" -ge 10 ]; then
  podscale bench train --sweep "$SWEEP" --budget "$budget" --time-limit 300 --profile --out "$OUT" \
    ${real[@]+"${real[@]}"} "$@"
else
  echo "no time is left for the sweep: $budget of LIMIT=$LIMIT s"
fi
# What each loader delivers to the GPU without a training beside it; the sweep has rows with one.
if [ ${#real[@]} != 0 ] && [ "$(left)" -gt 30 ]; then
  PYTHONSAFEPATH=1 timeout "$input" "$PYTHON" -m podscale bench input "${real[@]}" --device cuda:0 --seconds 2 --out "$OUT"
fi
# Times of the fused kernels by tile: constants of fused_calls.py that are not the fastest show here.
[ "$(left)" -lt 40 ] || PYTHONSAFEPATH=1 timeout 40 "$PYTHON" tools/fused_kernel_times.py | tee "$OUT/gpu-fused-kernels.md"
# The same of the 1x1 convolutions, beside cuDNN: constants of gemm_calls.py.
[ "$(left)" -lt 60 ] || PYTHONPATH=$PWD:$PYTHONPATH timeout 60 "$PYTHON" -m tools.gemm_kernel_times | tee "$OUT/gpu-gemm-kernels.md"
# Bytes and time of each kernel of one step, by hardware counters, which take about a minute.
if [ "$reserve" != 0 ] && [ "$(left)" -gt 60 ]; then
  mkdir -p "$TMPDIR/podscale-ncu"
  PYTHONSAFEPATH=1 timeout "$(left)" ncu --target-processes all --profile-from-start off --clock-control none \
    --cache-control none --csv --page raw --metrics gpu__time_duration.sum,dram__bytes.sum \
    --log-file "$OUT/gpu-kernels.csv" "$PYTHON" -m podscale bench train --set train.fused_kernels=norm --vary batch=256 \
    --profile --warmup 5 --steps 2 --parts 1 --out "$TMPDIR/podscale-ncu" >"$TMPDIR/podscale-ncu/log.txt" 2>&1
  PYTHONSAFEPATH=1 "$PYTHON" -m podscale.bench.kernel_classes "$OUT/gpu-kernels.csv" \
    "$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)" | tee "$OUT/gpu-kernels.md"
fi
