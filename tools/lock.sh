#!/usr/bin/env bash
# usage: [CPU_INDEX=URL] tools/lock.sh [--upgrade]
# Writes requirements/*.txt from pyproject.toml: names, versions and hashes for all platforms, without an index address.
# build, run, dev, docs and wheels are for this machine, and oldest for `make test-oldest`. The others are the packages
# of each image (see images/).
# With CPU_INDEX, only requirements/cpu.txt is written, which is not committed.
# Needs uv, from the development set or the PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=.venv/bin/uv
[ -x "$uv" ] || uv=$(command -v uv) || { echo "uv: not found. Run 'make .venv/.dev' first, or install uv." >&2; exit 2; }

compile() {
  "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url \
    --no-header --output-file "$@"
}
upgrade=("$@") project=pyproject.toml
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
# Writes an image's requirements: versions of run.txt, without packages that its pods never import. Images are installed
# with --no-deps, so they contain exactly these packages.
image() {
  local name=$1 unwanted=$2
  shift 2
  local leave_out=() package
  while read -r package; do leave_out+=(--no-emit-package "$package"); done \
    < <(grep -oE "^($unwanted)[a-z0-9-]*" requirements/run.txt | sort -u)
  compile "requirements/$name.txt" --constraint requirements/run.txt "${leave_out[@]}" "$@" "$project" "${upgrade[@]}"
}
cuda='nvidia-|cuda-|triton'

# podscale-base with PyTorch's CPU build: PyTorch comes from CPU_INDEX, all other packages from the usual index.
if [ -n "${CPU_INDEX:-}" ]; then
  { cat pyproject.toml
    printf '[[tool.uv.index]]\nname = "cpu"\nurl = "%s"\nexplicit = true\n' "$CPU_INDEX"
    printf '[tool.uv.sources]\ntorch = { index = "cpu" }\ntorchvision = { index = "cpu" }\n'
  } >"$work/pyproject.toml"
  project=$work/pyproject.toml
  image cpu "$cuda" --extra torch --extra cluster --extra export --extra serve
  exit
fi

compile requirements/build.txt requirements/build.in "${upgrade[@]}"
compile requirements/run.txt --extra torch --extra gpu --extra cluster --extra export --extra serve pyproject.toml "${upgrade[@]}"
# Without rfc3987-syntax and its parser: jsonschema imports it if it is there, which takes every process that imports the
# Kubernetes client a second or two, and no test needs a check of IRIs.
compile requirements/dev.txt --extra torch --extra gpu --extra cluster --extra dev --constraint requirements/run.txt \
  --no-emit-package rfc3987-syntax --no-emit-package lark pyproject.toml "${upgrade[@]}"
# The site's builder alone, in the versions of dev.txt: either file, or both in any order, leave one set of versions.
python3 -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' |
  compile requirements/docs.txt --constraint requirements/dev.txt "${upgrade[@]}" -
# What `make wheels` adds to the development set.
compile requirements/wheels.txt --constraint requirements/dev.txt requirements/wheels.in "${upgrade[@]}"

# The lower bounds of pyproject.toml, for what a user installs with PyTorch; JAX's too, on CPUs. What only tests import
# has the versions of dev.txt, or an old version if those need a later NumPy.
{ grep -oE '^(pytest[a-z-]*|hypothesis|jsonschema|kubernetes-validate)==\S+' requirements/dev.txt
  printf '%s\n' 'jax>=0.10' 'optax>=0.2.5' 'scikit-learn>=1.5' 'tensorboard>=2.18'
} >"$work/tools.in"
echo 'urllib3<2.8' >"$work/limits.in" # the oldest kfp takes no later one
compile requirements/oldest.txt --resolution lowest-direct --constraint "$work/limits.in" --extra torch --extra timm \
  --extra hub --extra export --extra serve --extra cluster pyproject.toml "$work/tools.in" "${upgrade[@]}"

image base "$cuda" --extra torch --extra cluster --extra export --extra serve
image tpu none --extra cluster requirements/tpu.in
image gpu-jax none --extra cluster requirements/gpu-jax.in
image tools none --extra cluster
