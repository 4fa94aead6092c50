#!/bin/bash
# usage: images/build.sh [NAME...]       base, gpu, tpu, gpu-jax, tools; default: all five
# Builds podscale-NAME:TAG with podman or docker (ENGINE). Used by `make images`. Environment variables:
#   BASE_IMAGE           base image, default docker.io/library/debian:bookworm-slim; images/debian.sh builds one
#                        without a registry
#   PIP_INDEX_URL        package index
#   PIP_EXTRA_INDEX_URL  second package index
#   PIP_CERT             certificates of a private index
#   CPU_INDEX            index of PyTorch's CPU build, which base then installs (needs uv, see tools/lock.sh)
#   REQUIREMENTS         hash-pinned file that replaces the image's own
#   REGISTRY, TAG        default localhost and dev
#   PUSH=yes             push each image to REGISTRY
#   ARCHIVES             folder in which the images are saved as docker archives, podscale-NAME.tar
#   NATIVE=no            build without the native decoder of native/, for which cargo downloads three crates
#   CACHE=no             build without the cache of earlier builds
set -euo pipefail
cd "$(dirname "$0")/.."
engine=${ENGINE:-$(command -v podman || command -v docker)} ||
  { echo "make images: needs podman or docker. Install one, or set ENGINE to its path." >&2; exit 2; }
registry=${REGISTRY:-localhost} tag=${TAG:-dev}
version=$(sed -n 's/^RELEASE = "\(.*\)"/\1/p' podscale/version.py)
revision=$(git describe --always --dirty --abbrev=40 --exclude='*' 2>/dev/null || true)
created=$(TZ=UTC git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%cd 2>/dev/null || echo 1980-01-01T00:00:00Z)
epoch=315532800 # 1980, the time of every file: a time that changes would create new layers for unchanged packages

arguments=(--build-arg "VERSION=$version" --build-arg "REVISION=$revision" --build-arg "SOURCE_DATE_EPOCH=$epoch"
  --build-arg "CREATED=$created")
for name in BASE_IMAGE PIP_INDEX_URL NATIVE; do
  if [ -n "${!name:-}" ]; then arguments+=(--build-arg "$name=${!name}"); fi
done
if [ -n "${PIP_CERT:-}" ]; then arguments+=(--secret "id=ca_bundle,src=$PIP_CERT"); fi
if [ "${CACHE:-}" = no ]; then arguments+=(--no-cache); fi
case $("$engine" --version) in
  podman* | buildah*) arguments+=(--timestamp "$epoch" --layers) ;;
esac

if [ -n "${CPU_INDEX:-}" ]; then tools/lock.sh; fi
for name in ${@:-base gpu tpu gpu-jax tools}; do
  image=$registry/podscale-$name:$tag requirements=${REQUIREMENTS:-} indexes=${PIP_EXTRA_INDEX_URL:-}
  if [ "$name" = base ] && [ -n "${CPU_INDEX:-}" ]; then
    requirements=requirements/cpu.txt indexes="$CPU_INDEX${indexes:+ $indexes}"
  fi
  packages=()
  if [ -n "$requirements" ]; then packages+=(--build-arg "REQUIREMENTS=$requirements"); fi
  if [ -n "$indexes" ]; then packages+=(--build-arg "PIP_EXTRA_INDEX_URL=$indexes"); fi
  echo "building $image"
  DOCKER_BUILDKIT=1 "$engine" build --quiet "${arguments[@]}" "${packages[@]}" --file "images/$name.Containerfile" --tag "$image" .
  "$engine" image inspect --format "{{.Size}}" "$image" | awk -v image="$image" '{printf "%s: %.0f MB\n", image, $1 / 1e6}'
  if [ "${PUSH:-}" = yes ]; then "$engine" push "$image"; fi
  if [ -n "${ARCHIVES:-}" ]; then mkdir -p "$ARCHIVES" && "$engine" save --output "$ARCHIVES/podscale-$name.tar" "$image"; fi
done
