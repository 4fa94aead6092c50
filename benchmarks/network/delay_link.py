"""Link with a delay, for kernels without netem: two TAP devices and a process that forwards frames.

Frames are up to 64 KiB with their offload header (IFF_VNET_HDR), as TCP sends them, so a few thousand reads and writes
a second move a hundred MB/s. The process keeps their order and drops none.
"""

import ctypes
import fcntl
import os
import select
import signal
import struct
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from podscale.util.processes import exit_with_parent

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
CLONE_NEWNET = 0x40000000
FRAME_BYTES = 2**17
"""Upper bound of a frame with its headers."""

Device = tuple[str, str]
"""Namespace, and name of the device in it."""


def enter_namespace(namespace: str) -> None:
    """Move this thread, and the processes it starts from now on, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(Path("/run/netns", namespace), os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(handle, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    finally:
        os.close(handle)


class DelayLink:
    """Link between two new devices: a frame sent on one arrives at the other `delay` seconds later."""

    def __init__(self, first: Device, second: Device, delay: float) -> None:
        ready, started = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                exit_with_parent(parent)
                os.close(ready)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                taps = _open_tap(first), _open_tap(second)
                os.write(started, b"1")
                _forward(taps, delay)
            finally:
                os._exit(1)
        os.close(started)
        if os.read(ready, 1) != b"1":
            raise OSError(f"no TAP devices for the link from {first} to {second}")
        os.close(ready)

    def close(self) -> None:
        """Kill the process, which removes its devices."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0


def _open_tap(device: Device) -> int:
    """Create a TAP device; return its non-blocking file descriptor."""
    enter_namespace(device[0])
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH14x", device[1].encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(handle, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return handle


def _forward(taps: tuple[int, int], delay: float) -> None:
    """Forward frames in both directions until the process is killed."""
    queue: deque[tuple[float, int, bytes]] = deque()  # one for both directions, since all frames wait equally long
    while True:
        wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        for source in select.select(taps, (), (), wait)[0]:
            target = taps[1] if source == taps[0] else taps[0]
            _receive(source, target, time.monotonic() + delay, queue)
        now = time.monotonic()
        while queue and queue[0][0] <= now:
            _, target, frame = queue.popleft()
            with suppress(OSError):  # EIO while the other device is not up yet
                os.write(target, frame)


def _receive(source: int, target: int, due: float, queue: deque[tuple[float, int, bytes]]) -> None:
    """Read at most a few frames, so that due frames are not held up by a burst."""
    for _ in range(8):
        try:
            queue.append((due, target, os.read(source, FRAME_BYTES)))
        except BlockingIOError:
            return
