"""A cable with a delay, for kernels without netem: two TAP devices and a process that passes frames on, later.

Frames cross as TCP made them, up to 64 KiB with their offload header (IFF_VNET_HDR), so a few thousand reads and
writes a second carry a hundred MB/s. Order is kept and nothing is dropped.
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
"""More than the largest frame with its headers."""

End = tuple[str, str]
"""A namespace and the name of the device there."""


def enter(namespace: str) -> None:
    """Move this thread, and the processes it starts from now on, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(Path("/run/netns", namespace), os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(handle, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    finally:
        os.close(handle)


class Wire:
    """Joins two devices that it makes; a frame sent on one arrives at the other `delay` seconds later."""

    def __init__(self, first: End, second: End, delay: float) -> None:
        ready, started = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                exit_with_parent(parent)
                os.close(ready)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                ends = _tap(first), _tap(second)
                os.write(started, b"1")
                _pass_on(ends, delay)
            finally:
                os._exit(1)
        os.close(started)
        if os.read(ready, 1) != b"1":
            raise OSError(f"no TAP devices for the wire from {first} to {second}")
        os.close(ready)

    def close(self) -> None:
        """Kill the process; the devices go with it."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0


def _tap(end: End) -> int:
    """Make a TAP device in a namespace; returns its file, which does not block."""
    enter(end[0])
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH14x", end[1].encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(handle, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return handle


def _pass_on(ends: tuple[int, int], delay: float) -> None:
    """Carry frames both ways for ever."""
    held: deque[tuple[float, int, bytes]] = deque()  # one queue for both ways: every frame waits equally long
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        for source in select.select(ends, (), (), wait)[0]:
            target = ends[1] if source == ends[0] else ends[0]
            _take(source, target, time.monotonic() + delay, held)
        now = time.monotonic()
        while held and held[0][0] <= now:
            _, target, frame = held.popleft()
            with suppress(OSError):  # EIO while the other device is not up yet: a cable plugged in on one side
                os.write(target, frame)


def _take(source: int, target: int, due: float, held: deque[tuple[float, int, bytes]]) -> None:
    """Read a few frames at most, so that frames that are due do not wait for a flood."""
    for _ in range(8):
        try:
            held.append((due, target, os.read(source, FRAME_BYTES)))
        except BlockingIOError:
            return
