#!/bin/sh
# usage: packages.sh REQUIREMENTS
# Installs the hash-pinned requirements into /opt/podscale. pip reads PIP_INDEX_URL and PIP_EXTRA_INDEX_URL from the
# build arguments, and the certificates of a private index from the secret "ca_bundle".
set -eu
if [ -s /run/secrets/ca_bundle ]; then export PIP_CERT=/run/secrets/ca_bundle; fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_DEPS=1 PIP_QUIET=1 PIP_ROOT_USER_ACTION=ignore
export PIP_CACHE_DIR=/var/cache/pip # mounted: downloads are kept between builds, outside of all layers
rm -rf "$PIP_CACHE_DIR/wheels"     # but packages from source are built each time, so that differences are noticed

python3 -m venv /opt/pip
/opt/pip/bin/pip install --require-hashes --only-binary :all: -r requirements/build.txt
# Some packages are published as source only. pip checks their hash too, and the tools installed above build them. pip
# stores the hash of the built wheel in direct_url.json. Wheels contain times, so SOURCE_DATE_EPOCH must be set here.
/opt/pip/bin/pip wheel --require-hashes --no-build-isolation --wheel-dir /wheels -r "$1"
python3 -m venv --without-pip /opt/podscale
/opt/pip/bin/pip --python /opt/podscale/bin/python install --no-cache-dir --no-compile --no-index /wheels/*.whl
rm -r /wheels
