#!/bin/sh
# Base system of every image: Debian with Python and certificates, user 65532, no setuid or setgid files.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends ca-certificates python3 >/dev/null

# Frameworks look up the name of the user that they run as.
echo "podscale:x:65532:" >>/etc/group
echo "podscale:x:65532:65532:Podscale:/tmp:/usr/sbin/nologin" >>/etc/passwd

find / -xdev -type f -perm /6000 -exec chmod ug-s {} +
# Lists, logs, caches and backups differ between builds, and no process reads them.
rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/* /etc/passwd- /etc/group- /tmp/*
find /usr/lib/python3* /usr/share/python3* -type d -name __pycache__ -prune -exec rm -rf {} +
python3 -m compileall -q -j 1 --invalidation-mode unchecked-hash /usr/lib/python3.* >/dev/null || true
