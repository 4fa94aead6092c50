#!/bin/sh
# usage: debian.sh NAME [SUITE]
# Builds a Debian base image without a registry: debootstrap, as root, from its default package archive or from
# DEBIAN_MIRROR. Then: make images BASE_IMAGE=NAME
set -eu
name=$1 suite=${2:-bookworm} engine=${ENGINE:-podman}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=ca-certificates "$suite" "$root" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >"$root.log" ||
  { tail -n 5 "$root.log" >&2; exit 1; }
rm -f "$root.log"
mirror=$(awk '$1 == "deb" { print $2; exit }' "$root/etc/apt/sources.list")  # as debootstrap wrote it
cat >"$root/etc/apt/sources.list" <<END
deb $mirror $suite main
deb $mirror $suite-updates main
deb $mirror-security $suite-security main
END
# No documentation, now or after an upgrade, as in Debian's own slim images.
cat >"$root/etc/dpkg/dpkg.cfg.d/slim" <<END
path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/man/*
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
END
find "$root/usr/share/doc" -type f ! -name copyright -delete
rm -rf "$root"/usr/share/man/* "$root"/usr/share/info/* "$root"/usr/share/locale/*
# TMPDIR is a folder outside the chroot. Package scripts would look for it inside.
env -u TMPDIR chroot "$root" sh -c 'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get upgrade -qq -y >/dev/null'
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/*
tar --numeric-owner --sort=name --mtime=@"${SOURCE_DATE_EPOCH:-0}" --one-file-system -C "$root" -c . | "$engine" import --change CMD=/bin/sh - "$name"
