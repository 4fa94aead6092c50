"""Emulated cluster on one machine: Linux network namespaces joined by rate-limited virtual links.

Every rank runs in its own namespace with one network card `eth0`. A bridge joins the ranks of a node (as NVLink or PCIe
does in a real node). A core bridge joins the nodes, each behind one uplink (its network card):

    rank eth0 ==rank link==> node bridge ==node link==> core bridge <== node link == node bridge <== ...

`tc tbf` limits both directions of both kinds of link. Queues are longer than the TCP windows, so no packet is dropped.
A node link can be a `DelayLink`, which delays every frame.

Namespaces are named after the process id and the start time of their owner. A cluster is removed when its block ends or
the process exits; the next cluster, or `clean_up`, removes those of killed processes.
"""

import atexit
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.network.delay_link import DelayLink

PREFIX = "podscale-lab-"
NAMESPACES = Path("/run/netns")
QUEUE_BYTES = 32 * 2**20
FRAME_BYTES = 2**15
"""Largest frame that TCP segmentation offload makes (otherwise 64 KiB)."""
BURST_BYTES = FRAME_BYTES + 2**12
"""Bytes that a link sends at once after a pause: one frame with its headers. More would make small messages free."""
WINDOW_BYTES = 2**20
MTU = 9000
"""Bytes of a packet, as usual between the nodes of a training cluster; headers take 0.9 % of a link."""


@dataclass(frozen=True)
class ClusterShape:
    """Nodes and links of a cluster.

    Args:
        ranks: ranks of each node.
        rank_rate: bytes/s of each rank's link, in each direction.
        node_rate: bytes/s of each node's link, in each direction.
        node_delay: one-way delay of a node's link, seconds; a frame from node to node passes two of them.
    """

    nodes: int
    ranks: int
    rank_rate: float
    node_rate: float
    node_delay: float = 0.0

    @property
    def size(self) -> int:
        return self.nodes * self.ranks

    @property
    def ratio(self) -> float:
        return self.rank_rate / self.node_rate

    def __str__(self) -> str:
        delay = f", {self.node_delay * 2e3:g} ms from node to node" if self.node_delay else ""
        return (
            f"{self.nodes} nodes x {self.ranks} ranks; each rank's link {self.rank_rate / 1e6:g} MB/s, "
            f"each node's {self.node_rate / 1e6:g} MB/s{delay}"
        )


class NetnsCluster:
    """Emulated cluster. `namespaces[r]` and `addresses[r]` (IPv4) belong to rank r; ranks fill node after node."""

    def __init__(self, shape: ClusterShape) -> None:
        self.shape = shape
        self._name = f"{PREFIX}{os.getpid()}-{_start_time(os.getpid())}-"
        self._core = f"{self._name}core"
        self._nodes = [f"{self._name}n{node}" for node in range(shape.nodes)]
        ranks = [divmod(rank, shape.ranks) for rank in range(shape.size)]
        self.namespaces = [f"{self._nodes[node]}r{local_rank}" for node, local_rank in ranks]
        self.addresses = [f"10.77.{node}.{local_rank + 1}" for node, local_rank in ranks]
        self._delay_links: list[DelayLink] = []

    def build(self) -> None:
        """Create namespaces, bridges and links. Needs root."""
        _batch([f"netns add {name}" for name in (self._core, *self._nodes, *self.namespaces)])
        for name in self.namespaces:
            _run("ip", "netns", "exec", name, "sysctl", "-qw", *_TCP)
        for name in (self._core, *self._nodes):
            _batch(["link add bridge type bridge", f"link set bridge mtu {MTU} up"], name)
        for node, name in enumerate(self._nodes):
            self._uplink(name, f"up{node}")
        for rank, (name, address) in enumerate(zip(self.namespaces, self.addresses, strict=True)):
            self._rank_link(rank, name, address)

    def _uplink(self, node: str, port: str) -> None:
        shape = self.shape
        if shape.node_delay:
            self._delay_links.append(DelayLink((node, "uplink"), (self._core, port), shape.node_delay))
        else:
            _batch([f"link add uplink netns {node} type veth peer name {port} netns {self._core}"])
        for namespace, device in ((node, "uplink"), (self._core, port)):
            _batch([f"link set {device} mtu {MTU} gso_max_size {FRAME_BYTES} master bridge up"], namespace)
            _limit(namespace, device, shape.node_rate)

    def _rank_link(self, rank: int, name: str, address: str) -> None:
        node, port = self._nodes[rank // self.shape.ranks], f"r{rank % self.shape.ranks}"
        _batch([f"link add eth0 netns {name} type veth peer name {port} netns {node}"])
        _batch([f"link set {port} mtu {MTU} gso_max_size {FRAME_BYTES} master bridge up"], node)
        _batch(
            [
                "link set lo up",
                f"link set eth0 mtu {MTU} gso_max_size {FRAME_BYTES} up",
                f"address add {address}/16 dev eth0",
            ],
            name,
        )
        _limit(node, port, self.shape.rank_rate)
        _limit(name, "eth0", self.shape.rank_rate)

    def node_bytes(self) -> int:
        """Return the bytes that all nodes together have sent over their links."""
        return sum(_sent(node, "uplink") for node in self._nodes)

    def rank_bytes(self) -> int:
        """Return the bytes that all ranks together have sent over their links."""
        return sum(_sent(name, "eth0") for name in self.namespaces)

    def remove(self) -> None:
        """Kill the processes in the namespaces, and remove all namespaces and devices."""
        for link in self._delay_links:
            link.close()
        _remove([name for name in _existing() if name.startswith(self._name)])


_TCP = (
    "net.ipv4.tcp_congestion_control=reno",  # some others pace packets, which would be a second shaper
    f"net.ipv4.tcp_rmem=4096 262144 {WINDOW_BYTES}",
    f"net.ipv4.tcp_wmem=4096 262144 {WINDOW_BYTES}",
    "net.ipv4.tcp_slow_start_after_idle=0",  # in a real cluster links are not idle between rounds
)


@contextmanager
def netns_cluster(shape: ClusterShape) -> Iterator[NetnsCluster]:
    """Create a cluster for the time of the block, after `clean_up`. Raises PermissionError without root."""
    if os.geteuid() != 0:
        raise PermissionError("network namespaces need root: start this as root, or in a privileged container")
    clean_up()
    cluster = NetnsCluster(shape)
    atexit.register(cluster.remove)
    try:
        cluster.build()
        yield cluster
    finally:
        cluster.remove()
        atexit.unregister(cluster.remove)


def unavailable_reason() -> str:
    """Return why this machine cannot emulate a cluster; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root: start this with sudo, or in a privileged container"
    if missing := [tool for tool in ("ip", "tc", "sysctl") if shutil.which(tool) is None]:
        return f"an emulated cluster needs {', '.join(missing)} (iproute2, procps)"
    if not Path("/dev/net/tun").exists():
        return "delayed links need /dev/net/tun"
    name = f"{PREFIX}0-0-trial"
    try:
        _batch([f"netns add {name}"])
        _limit(name, "lo", 1e6)
    except RuntimeError as error:
        return f"this machine cannot shape links of a namespace: {error}"
    finally:
        clean_up()
    return ""


def clean_up() -> list[str]:
    """Remove the namespaces of clusters whose owner has exited; return their names."""
    leftovers = [name for name in _existing() if not _is_owner_running(name)]
    _remove(leftovers)
    return leftovers


def _existing() -> list[str]:
    return sorted(path.name for path in NAMESPACES.glob(f"{PREFIX}*")) if NAMESPACES.is_dir() else []


def _is_owner_running(namespace: str) -> bool:
    pid, start = namespace.removeprefix(PREFIX).split("-")[:2]
    return _start_time(int(pid)) == start


def _start_time(pid: int) -> str | None:
    """Return the start of a process in clock ticks since boot, which tells it from a later one with the same id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        return None


def _remove(namespaces: Sequence[str]) -> None:
    """Kill the processes in the namespaces, and delete the namespaces with their devices."""
    for name in namespaces:
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
        for pid in map(int, pids):
            if pid != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    if namespaces:
        _batch([f"netns delete {name}" for name in namespaces])


def _limit(namespace: str, device: str, rate: float) -> None:
    """Limit what `device` sends to `rate` bytes/s."""
    shaping = f"tbf rate {round(rate * 8)}bit burst {BURST_BYTES} limit {QUEUE_BYTES}"
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shaping.split())


def _sent(namespace: str, device: str) -> int:
    return int(_run("ip", "netns", "exec", namespace, "cat", f"/sys/class/net/{device}/statistics/tx_bytes"))


def _batch(commands: Sequence[str], namespace: str | None = None) -> None:
    """Run several `ip` commands in one process."""
    _run("ip", *(["-n", namespace] if namespace else []), "-batch", "-", stdin="\n".join(commands))


def _run(*command: str, stdin: str = "") -> str:
    result = subprocess.run(command, input=stdin, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}\n{stdin}")
    return result.stdout
