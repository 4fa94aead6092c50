"""Bridge with the node's address, kernel settings, and removal of both."""

import contextlib
import json
import re
from pathlib import Path

from tests.cluster.lab import places
from tests.cluster.lab.commands import attempt, run

FILTERED = "net/bridge/bridge-nf-call-iptables"
# Set by this module (the first two), by the kubelet and by kube-proxy.
SETTINGS = (
    "net/ipv4/ip_forward",
    FILTERED,
    "net/ipv4/conf/all/route_localnet",
    "net/netfilter/nf_conntrack_tcp_timeout_established",
    "net/netfilter/nf_conntrack_tcp_timeout_close_wait",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
)
OUR_CHAINS = re.compile(r"\b(KUBE|CNI)-")
OUR_FOLDERS = ("/var/lib/kubelet/device-plugins", "/var/log/containers")


def up() -> None:
    """Save the machine's settings, then create the bridge. CNI and kube-proxy create the rest of the network."""
    _remember()
    if attempt("ip", "link", "show", places.BRIDGE).returncode:
        run("ip", "link", "add", places.BRIDGE, "type", "bridge")
    run("ip", "addr", "replace", f"{places.NODE_IP}/24", "dev", places.BRIDGE)
    run("ip", "link", "set", places.BRIDGE, "up")
    if not Path("/proc/sys", FILTERED).exists():  # it may be built into the kernel, and then needs no modprobe
        attempt("modprobe", "br_netfilter")
    for name in SETTINGS[:2]:
        _write(name, "1")


def down() -> None:
    """Remove the cluster's state from the kernel and outside its own folders, and restore the settings."""
    for target in _mounts():
        attempt("umount", "--lazy", target)
    for name in _namespaces():
        if not attempt("ip", "netns", "pids", name).stdout.strip():
            attempt("ip", "netns", "delete", name)
    attempt("ip", "link", "delete", places.BRIDGE)
    for family in ("iptables", "ip6tables"):
        _drop_chains(family)
    _remove_control_groups()
    for pattern in ("podscale-cluster-*", "cni-loopback-*"):  # CNI's record of each pod's interfaces
        for leftover in Path("/var/lib/cni/results").glob(pattern):
            leftover.unlink()
    for folder in OUR_FOLDERS:
        _remove_links_and_folder(Path(folder))
    _restore()


def _record() -> Path:
    return places.STATE / "settings.json"


def _remember() -> None:
    if not _record().exists():
        places.STATE.mkdir(parents=True, exist_ok=True)
        paths = {name: Path("/proc/sys", name) for name in SETTINGS}
        _record().write_text(json.dumps({name: path.read_text() for name, path in paths.items() if path.exists()}))


def _restore() -> None:
    if _record().exists():
        for name, value in json.loads(_record().read_text()).items():
            _write(name, value)


def _write(name: str, value: str) -> None:
    with contextlib.suppress(OSError):  # this kernel lacks the setting, or it is read-only here
        Path("/proc/sys", name).write_text(value)


def _mounts() -> list[str]:
    targets = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    prefixes = (f"{places.STATE}/", f"{places.RUN}/")
    return sorted((target for target in targets if target.startswith(prefixes)), reverse=True)


def _namespaces() -> list[str]:
    """Return the network namespaces of pod sandboxes, by containerd's prefix, which podman does not use."""
    return [path.name for path in Path("/run/netns").glob("cni-*")]


def _drop_chains(family: str) -> None:
    """Remove the chains of Kubernetes and CNI, and the rules that jump to them; keep all others."""
    saved = attempt(f"{family}-save").stdout
    remaining = "".join(line for line in saved.splitlines(keepends=True) if not OUR_CHAINS.search(line))
    if remaining != saved:
        attempt(f"{family}-restore", stdin=remaining)


def _remove_control_groups() -> None:
    for root in Path("/sys/fs/cgroup").glob("**/kubepods"):
        for folder in sorted((path for path in root.rglob("*") if path.is_dir()), reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()
        with contextlib.suppress(OSError):
            root.rmdir()


def _remove_links_and_folder(folder: Path) -> None:
    if folder.is_dir():
        for entry in folder.iterdir():
            if entry.is_symlink() or entry.is_socket() or entry.name == "kubelet_internal_checkpoint":
                entry.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()
