"""Process lifetime, signal handling and calls with a timeout. Linux only: /proc, pidfd, prctl.

`preempt_on_sigterm` interrupts at any moment, so it is only for work with atomic output. Training ranks check a flag
between steps instead (podscale.distributed.step_status).
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
    """Request SIGKILL when the parent exits; exit at once if the parent is no longer `parent` (a pid).

    The request survives exec. The kernel watches the parent's *thread*, so start children from the main thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent is not None and os.getppid() != parent:
        kill_self()


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number in words: most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_with_process(pid: int) -> None:
    """Kill this process when the process `pid` exits; at once if it is gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        kill_self()
    threading.Thread(target=_exit_on_process_end, args=(handle,), name="launcher-watch", daemon=True).start()


def exit_with_lock_holder(path: Path) -> None:
    """Kill this process when the lock of a file is released; works in a container that mounts the file.

    Do nothing if the file is not locked, as on a file system that does not show locks to containers.
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
    """Return the state of a process as in /proc (T: stopped, Z: zombie); empty if it is gone."""
    fields = _stat_fields(pid)
    return fields[0] if fields else ""


def start_ticks(pid: int) -> int:
    """Return the start of a live process in clock ticks since boot; 0 if there is none or it is a zombie."""
    fields = _stat_fields(pid)
    return 0 if not fields or fields[0] in "ZX" else int(fields[19])


def parent_of(pid: int) -> int:
    """Return the parent's pid; 0 if the process is gone."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else 0


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the name, the state first; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def process_age() -> float:
    """Return the seconds since this process started."""
    started = start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def is_alive(pid: int) -> bool:
    """Return False for a process that is gone or a zombie."""
    return process_state(pid) not in ("", "Z", "X")


def kill_self() -> None:
    """Kill this process with SIGKILL; the kernel's parent-death signal kills its children."""
    os.kill(os.getpid(), signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)  # process 1 of a container does not get its own SIGKILL


def _exit_on_process_end(handle: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)  # a pidfd becomes readable when its process ends
    poll.poll()
    kill_self()


DUPLICATE_SIGNAL_SECONDS = 0.3
"""Time in which a second signal repeats the request (`timeout` also signals the process group), seconds."""

STOP_MESSAGE = "stopped on request; the same command continues"


class SigtermReceived(BaseException):
    """SIGTERM, raised by the signal handler at any point; `except Exception` does not catch it."""


def raise_on_sigterm(message: str = STOP_MESSAGE) -> Any:
    """Raise SigtermReceived(message) at the first SIGTERM, ignore further ones, and return the previous handler."""

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the cleanup is short, and must not be interrupted again
        raise SigtermReceived(message)

    return signal.signal(signal.SIGTERM, handle)


@contextmanager
def preempt_on_sigterm() -> Iterator[None]:
    """Interrupt the body at SIGTERM and raise Preempted."""
    before = raise_on_sigterm()
    try:
        yield
    except SigtermReceived as stop:
        raise Preempted(str(stop)) from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer SIGTERM and SIGINT until the body is done.

    The handlers are replaced because a mask covers one thread only: another thread would get the signal, and Python
    runs handlers in the main thread. On other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    current = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    handlers = {number: handler for number, handler in current.items() if handler is not None}  # None: not Python's
    try:
        for number in handlers:
            signal.signal(number, lambda received, _: pending.append(received))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received in pending:
            signal.raise_signal(received)


T = TypeVar("T")


def call_with_timeout(timeout_seconds: float, action: Callable[[], T]) -> T:
    """Return the result of `action`, or raise TimeoutError; a hanging action continues in a daemon thread."""
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
