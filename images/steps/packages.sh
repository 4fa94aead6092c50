#!/bin/sh
# usage: packages.sh REQUIREMENTS
# Installs the hash-pinned file into /opt/podscale. pip reads PIP_INDEX_URL and PIP_EXTRA_INDEX_URL from the build
# arguments, and the certificates of a private index from the secret "ca_bundle".
set -eu
if [ -s /run/secrets/ca_bundle ]; then export PIP_CERT=/run/secrets/ca_bundle; fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_DEPS=1 PIP_QUIET=1 PIP_ROOT_USER_ACTION=ignore
export PIP_CACHE_DIR=/var/cache/pip # mounted: downloads are kept from one build to the next, outside of every layer
rm -rf "$PIP_CACHE_DIR/wheels"     # but what is built from source is built each time, or nobody would see it differ

python3 -m venv /opt/pip
/opt/pip/bin/pip install --require-hashes --only-binary :all: -r requirements/build.txt
# Some packages come as source only: pip checks their hash too, and the tools installed above build them. pip keeps the
# hash of what they built in direct_url.json, so that SOURCE_DATE_EPOCH has to be set here: archives carry times.
/opt/pip/bin/pip wheel --require-hashes --no-build-isolation --wheel-dir /wheels -r "$1"
python3 -m venv --without-pip /opt/podscale
/opt/pip/bin/pip --python /opt/podscale/bin/python install --no-cache-dir --no-compile --no-index /wheels/*.whl
rm -r /wheels
