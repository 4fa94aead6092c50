"""Processes that end with the one they serve, even where that is killed; whether one lives. Linux only: /proc.

A request to stop (SIGTERM), for work that can be given up at any moment because its products appear at once.

Training is not of that kind: its ranks look at a flag between updates (see podscale.distributed.step_status), and the supervisor
waits for them.

Waiting for what may hang, for a while only.
"""

import ctypes
import fcntl
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from podscale.errors import Preempted

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


DUPLICATE_SIGNAL_SECONDS = 0.3
"""A request to a whole process group reaches a process twice at the same moment (as `timeout` sends it); only a later
one is a person who insists."""

STOP_MESSAGE = "stopped on request; the same command continues"


class SigtermReceived(BaseException):
    """Raised by the signal handler in the middle of anything, so no `except Exception` may take it for its own."""


def raise_on_sigterm(message: str = STOP_MESSAGE) -> Any:
    """From now on the first SIGTERM raises Stopped(text), further ones are ignored; returns the handler before.

    Call it from the main thread.
    """

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is left to do is short, and must not be cut again
        raise SigtermReceived(message)

    return signal.signal(signal.SIGTERM, handle)


@contextmanager
def preempt_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the body, which then raises Preempted."""
    before = raise_on_sigterm()
    try:
        yield
    except SigtermReceived as stop:
        raise Preempted(str(stop)) from None
    finally:
        signal.signal(signal.SIGTERM, before)


T = TypeVar("T")


def call_with_timeout(timeout_seconds: float, action: Callable[[], T]) -> T:
    """The result of `action`, or TimeoutError; an action that hangs is left in a thread that holds up no exit."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(action())
        except BaseException as error:  # handed to the caller's thread
            failure.append(error)

    thread = threading.Thread(target=run, name="podscale-within", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {timeout_seconds:g} s")
    if failure:
        raise failure[0]
    return result[0]
