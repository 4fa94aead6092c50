#!/bin/sh
# usage: package.sh IMAGE
# Installs Podscale and the image's SBOM under /out/opt/podscale, for a separate layer: it changes with every commit,
# unlike the packages in the layer below.
set -eu
export PODSCALE_NATIVE=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_DEPS=1 PIP_QUIET=2 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
/opt/pip/bin/pip wheel --no-build-isolation --wheel-dir /wheel .
/opt/pip/bin/pip --python /opt/podscale/bin/python install --no-compile --no-index --no-warn-script-location --root /out /wheel/*.whl
crates=
if [ -e /native/_native.abi3.so ]; then
  cp /native/_native.abi3.so /out/opt/podscale/lib/python3.*/site-packages/podscale/data/
  crates="--crates native/Cargo.lock"
fi
sh images/steps/compile.sh /out/opt/podscale/lib/python3.*/site-packages
mkdir -p /out/opt/podscale/share/podscale
# shellcheck disable=SC2086 # an option and its value, or nothing
python3 images/sbom.py --name "$1" $crates --dpkg-status /opt/dpkg-status /opt/podscale /out/opt/podscale \
  >/out/opt/podscale/share/podscale/sbom.spdx.json
