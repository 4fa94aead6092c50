"""Nodes and links of a small cluster on one machine: Linux network namespaces joined by shaped virtual cables.

Every rank lives in a namespace of its own, with one network card `eth0`. The ranks of a node meet at that node's bridge
(what NVLink or PCIe is to a real node), the nodes at a core bridge, each behind one uplink (its network card):

    rank eth0 ==rank link==> node bridge ==node link==> core bridge <== node link == node bridge <== ...

Both directions of both kinds of link are limited by `tc tbf`. Queues are longer than the TCP windows, so that
nothing is ever dropped. A node link may be a `wire` that holds every frame back for a while (see wire.py).

Everything of a lab carries its owner's process id and start time in its names. A lab cleans up when its block ends
and when the process exits; what a killed process left is removed by the next lab, or by `clean_up`.
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

from benchmarks.network.wire import Wire

PREFIX = "podscale-lab-"
NAMESPACES = Path("/run/netns")
QUEUE_BYTES = 32 * 2**20
FRAME_BYTES = 2**15
"""Largest frame that TCP segmentation offload makes (otherwise 64 KiB)."""
BURST_BYTES = FRAME_BYTES + 2**12
"""What a link may send at once after a pause, one frame with its headers: more would make small messages free."""
WINDOW_BYTES = 2**20
MTU = 9000
"""As usual between the nodes of a training cluster; headers take 0.9 % of a link."""


@dataclass(frozen=True)
class Shape:
    """A cluster: nodes, ranks in each, and its links.

    rank_rate, node_rate: bytes/s of each rank's link and of each node's, in each direction.
    node_delay: seconds that a node's link adds one way (from node to node a frame passes two of them).
    """

    nodes: int
    ranks: int
    rank_rate: float
    node_rate: float
    node_delay: float = 0.0

    @property
    def size(self) -> int:
        """Ranks in all."""
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


class Lab:
    """A running cluster. `namespaces[r]` is rank r's, `addresses[r]` its IPv4 address; ranks fill node after node."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._name = f"{PREFIX}{os.getpid()}-{_start_time(os.getpid())}-"
        self._core = f"{self._name}core"
        self._nodes = [f"{self._name}n{node}" for node in range(shape.nodes)]
        places = [(node, place) for node in range(shape.nodes) for place in range(shape.ranks)]
        self.namespaces = [f"{self._nodes[node]}r{place}" for node, place in places]
        self.addresses = [f"10.77.{node}.{place + 1}" for node, place in places]
        self._wires: list[Wire] = []

    def build(self) -> None:
        """Make namespaces, bridges and links. Needs root."""
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
            self._wires.append(Wire((node, "uplink"), (self._core, port), shape.node_delay))
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
        """Bytes that the nodes have sent over their links so far, all nodes together."""
        return sum(_sent(node, "uplink") for node in self._nodes)

    def rank_bytes(self) -> int:
        """Bytes that the ranks have sent over their links so far, all ranks together."""
        return sum(_sent(name, "eth0") for name in self.namespaces)

    def remove(self) -> None:
        """Kill the processes in the namespaces, and remove everything."""
        for wire in self._wires:
            wire.close()
        _remove([name for name in _existing() if name.startswith(self._name)])


_TCP = (
    "net.ipv4.tcp_congestion_control=reno",  # a machine may have set one that paces by itself: another shaper
    f"net.ipv4.tcp_rmem=4096 262144 {WINDOW_BYTES}",
    f"net.ipv4.tcp_wmem=4096 262144 {WINDOW_BYTES}",
    "net.ipv4.tcp_slow_start_after_idle=0",  # nodes of a cluster talk all the time; here they pause between rounds
)


@contextmanager
def lab(shape: Shape) -> Iterator[Lab]:
    """A cluster of this shape for the time of the block; leftovers of killed owners are removed first.

    Raises PermissionError without root.
    """
    if os.geteuid() != 0:
        raise PermissionError("network namespaces need root: start this as root, or in a privileged container")
    clean_up()
    built = Lab(shape)
    atexit.register(built.remove)
    try:
        built.build()
        yield built
    finally:
        built.remove()
        atexit.unregister(built.remove)


def obstacle() -> str:
    """Reason why there can be no lab on this machine; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root: start this with sudo, or in a privileged container"
    if missing := [tool for tool in ("ip", "tc", "sysctl") if shutil.which(tool) is None]:
        return f"the lab needs {', '.join(missing)} (iproute2, procps)"
    if not Path("/dev/net/tun").exists():
        return "the lab's delays need /dev/net/tun"
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
    """Remove the namespaces of labs whose owner has exited; returns their names."""
    leftovers = [name for name in _existing() if not _is_owner_running(name)]
    _remove(leftovers)
    return leftovers


def _existing() -> list[str]:
    return sorted(path.name for path in NAMESPACES.glob(f"{PREFIX}*")) if NAMESPACES.is_dir() else []


def _is_owner_running(namespace: str) -> bool:
    pid, start = namespace.removeprefix(PREFIX).split("-")[:2]
    return _start_time(int(pid)) == start


def _start_time(pid: int) -> str | None:
    """Start of a process in ticks since boot; with its id it names the process even after ids were reused."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        return None


def _remove(namespaces: Sequence[str]) -> None:
    """Kill the processes in the namespaces, and delete these with their devices."""
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
    read = _run("ip", "netns", "exec", namespace, "cat", f"/sys/class/net/{device}/statistics/tx_bytes")
    return int(read)


def _batch(commands: Sequence[str], namespace: str | None = None) -> None:
    """Run several `ip` commands in one process."""
    _run("ip", *(["-n", namespace] if namespace else []), "-batch", "-", stdin="\n".join(commands))


def _run(*command: str, stdin: str = "") -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}\n{stdin}")
    return done.stdout
