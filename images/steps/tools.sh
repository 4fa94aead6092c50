#!/bin/sh
# Build tools that no image keeps: a compiler for the stubs of slim_torch.py, and pip.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends gcc libc6-dev python3-venv >/dev/null
