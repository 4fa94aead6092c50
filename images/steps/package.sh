#!/bin/sh
# usage: package.sh IMAGE
# Installs Podscale and the image's SBOM under /out/opt/podscale, for a separate layer: it changes with every commit,
# unlike the packages in the layer below.
set -eu
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_DEPS=1 PIP_QUIET=2 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
/opt/pip/bin/pip wheel --no-build-isolation --wheel-dir /wheel .
/opt/pip/bin/pip --python /opt/podscale/bin/python install --no-compile --no-index --no-warn-script-location --root /out /wheel/*.whl
sh images/steps/compile.sh /out/opt/podscale/lib/python3.*/site-packages
mkdir -p /out/opt/podscale/share/podscale
python3 images/sbom.py --name "$1" --dpkg-status /opt/dpkg-status /opt/podscale /out/opt/podscale \
  >/out/opt/podscale/share/podscale/sbom.spdx.json
