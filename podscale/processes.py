"""Processes that end with the one they serve, even where that is killed; whether one lives. Linux only: /proc."""

import ctypes
import fcntl
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PR_SET_PDEATHSIG = 1


def exit_with_parent(parent: int | None = None) -> None:
    """Asks the kernel for SIGKILL when the parent ends; with `parent`, its pid, dies at once where it already has.

    The request survives exec. It goes by the parent's *thread*: parents start children from their main thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent is not None and os.getppid() != parent:
        kill_self()


def exit_with_process(pid: int) -> None:
    """Ends this process when the process `pid` ends, whoever is in between; at once where it is gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        kill_self()
    threading.Thread(target=_exit_on_process_end, args=(handle,), name="launcher-watch", daemon=True).start()


@contextmanager
def hold_lock_file(path: Path) -> Iterator[None]:
    """Holds a new file locked, for others to see that this process lives; the lock ends with it, however it ends."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def exit_with_lock_holder(path: Path) -> None:
    """Ends this process when the lock of a file is given up, which is seen through the mounts of a container.

    Nothing is watched where the file is not locked: its file system does not show locks to containers.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        threading.Thread(target=_exit_on_lock_release, args=(descriptor,), name="lifeline", daemon=True).start()
    else:
        os.close(descriptor)


def _exit_on_lock_release(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    kill_self()


def process_state(pid: int) -> str:
    """The state of a process as in /proc (T: stopped, Z: a zombie); empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def start_ticks(pid: int) -> int:
    """Start of a living process in clock ticks since boot; 0 where there is none or it has ended (a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def process_age() -> float:
    """Seconds since this process started."""
    started = start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def is_alive(pid: int) -> bool:
    """False for a process that is gone or a zombie."""
    return process_state(pid) not in ("", "Z", "X")


def kill_self() -> None:
    """SIGKILL rather than an orderly end: what this process started dies by the kernel's parent-death signal."""
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)  # the first process of a container is spared its own signals


def _exit_on_process_end(handle: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)  # a pidfd becomes readable when its process ends
    while not poll.poll():
        pass
    kill_self()
