"""Processes that end with the one they serve, even where that is killed. Linux only."""

import ctypes
import os
import select
import signal
import threading

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Asks the kernel for SIGKILL when the parent ends; with `parent`, its pid, dies at once where it already has.

    The request survives exec. It goes by the parent's *thread*: parents start children from their main thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent is not None and os.getppid() != parent:
        die()


def die_with(pid: int) -> None:
    """Ends this process when the process `pid` ends, whoever is in between; at once where it is gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        die()
    threading.Thread(target=_watch, args=(handle,), name="launcher-watch", daemon=True).start()


def die() -> None:
    """SIGKILL rather than an orderly end: what this process started dies by the kernel's parent-death signal."""
    os.kill(os.getpid(), signal.SIGKILL)


def _watch(handle: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)  # a pidfd becomes readable when its process ends
    while not poll.poll():
        pass
    die()
