#!/bin/sh
# usage: native.sh
# Builds the native decoder (native/) as /native/_native.abi3.so, in a layer that only its own code changes. With
# NATIVE=no the folder stays empty, and the image decodes by Pillow: the same pixels at less than half the speed.
set -eu
mkdir /native
[ "${NATIVE:-yes}" = yes ] || exit 0
if [ -s /run/secrets/ca_bundle ]; then export CARGO_HTTP_CAINFO=/run/secrets/ca_bundle; fi
export CARGO_HOME=/var/cache/cargo # mounted: downloads are kept between builds, outside of all layers
cargo build --quiet --release --locked --manifest-path native/Cargo.toml --target-dir /tmp/native || {
  echo "native.sh: the native decoder was not built. make images NATIVE=no builds images without it." >&2
  exit 1
}
cp /tmp/native/release/lib_native.so /native/_native.abi3.so
rm -r /tmp/native
