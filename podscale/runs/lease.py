"""Run directory lease: a file lock, and a fencing number against late writers.

The user's command holds the lock (flock), which the kernel releases on exit, even after kill -9. Its processes get the
fencing number from their environment. Every new lease increases the number, so that a process of an earlier launch
finds another number and stops writing. Without file locks, the process id finds a holder on this machine, and only the
number guards against other machines.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

from podscale.errors import InputError, PodscaleError
from podscale.util import env
from podscale.util.processes import start_ticks

RECORD_BYTES = 512
POLL_SECONDS = 0.5
POD_EXIT_SECONDS = 60.0
"""Seconds after the grace time by which terminated pods have exited."""
LOCKING_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)

T = TypeVar("T")
logger = logging.getLogger(__name__)


class LeaseLost(PodscaleError):
    """Lease that a newer launch has taken over."""


class LeaseTaken(InputError):
    """Lease that a running launch holds."""


@dataclass(frozen=True)
class LeaseHolder:
    """Holder of the lease, with the time since it holds it (seconds since the epoch).

    `started` (clock ticks since boot) distinguishes reused process ids.
    """

    number: int
    host: str
    pid: int
    started: int
    since: float

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {when}"

    @property
    def alive_here(self) -> bool:
        return self.host == socket.gethostname() and start_ticks(self.pid) == self.started != 0


class Lease:
    """Exclusive right to write a run directory, until `release` or exit.

    Args:
        path: Lease file.
        number: Fencing number.
        descriptor: Open file that holds the lock; -1 if another process of the launch holds it.
    """

    def __init__(self, path: Path, number: int, descriptor: int = -1) -> None:
        self.path = path
        self.number = number
        self.check = lease_fence(path, number)
        """Raise LeaseLost if a newer lease exists; cheap enough for every log line."""
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, path: Path, wait_seconds: float = 0.0) -> "Lease":
        """Take the lease at `path`; raises LeaseTaken if another launch holds it after `wait_seconds`."""
        return _retry_while_taken(lambda: cls._acquire(path), wait_seconds)

    @classmethod
    def _acquire(cls, path: Path) -> "Lease":
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unwritable_error(path, error) from error
        try:
            lock = _try_lock(descriptor)
            previous = _parse_holder(os.pread(descriptor, RECORD_BYTES, 0))
            if lock == "taken" or (lock == "none" and previous and previous.alive_here):
                raise _taken_error(path, previous)
            number = previous.number + 1 if previous else 1
            _write_holder(descriptor, number)
            return cls(path, number, descriptor)
        except OSError as error:  # a full disk
            os.close(descriptor)
            raise _unwritable_error(path, error) from error
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def hold(cls, path: Path, environ: Mapping[str, str] = os.environ, wait_seconds: float = 0.0) -> "Lease":
        """Return the lease inherited from the launch (see `variables`), else `acquire` it.

        Raises LeaseLost if a newer launch has taken over an inherited lease.
        """
        number = env.read_number(env.FENCE, environ)
        if number is None or env.read_path(env.LEASE, environ) != path.absolute():
            return cls.acquire(path, wait_seconds)
        lease = cls(path, number)
        lease.check()
        return lease

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables by which the processes of this launch inherit the lease."""
        return {env.LEASE: str(self.path.absolute()), env.FENCE: str(self.number)}

    def release(self) -> None:
        """Release the lock; the number stays in the file. Safe to call twice."""
        if self._descriptor >= 0:
            # Unlock, because a child between fork and exec still shares the open file.
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def check_not_taken(path: Path, wait_seconds: float = 0.0) -> None:
    """Raise LeaseTaken if a running launch holds the lease at `path` after `wait_seconds`."""

    def check() -> None:
        held, holder = _read_lock_state(path)
        if held:
            raise _taken_error(path, holder)

    _retry_while_taken(check, wait_seconds)


def _retry_while_taken(attempt: Callable[[], T], seconds: float) -> T:
    """Retry `attempt` while the lease is taken, until the timeout."""
    deadline, logged = time.monotonic() + seconds, False
    while True:
        try:
            return attempt()
        except LeaseTaken as taken:
            if time.monotonic() >= deadline:
                raise
            if not logged:
                logger.warning("%s: %s. Waiting up to %.0f s for its exit", taken.field, taken.problem, seconds)
                logged = True
        time.sleep(POLL_SECONDS)


def lease_wait_seconds(grace_seconds: float) -> float:
    """Return the longest wait for a lease in seconds; in a pod, the pod that it replaces may still be saving."""
    return pod_exit_seconds(grace_seconds) if "KUBERNETES_SERVICE_HOST" in os.environ else 0.0


def pod_exit_seconds(grace_seconds: float) -> float:
    """Return the time after which terminated pods have exited, in seconds."""
    return grace_seconds + POD_EXIT_SECONDS


def is_held(path: Path) -> bool:
    """Return True if a running launch holds the lease at `path`."""
    return _read_lock_state(path)[0]


def _read_lock_state(path: Path) -> tuple[bool, LeaseHolder | None]:
    """Return True if the lease is held, and its last holder."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False, None  # no lease yet, or a directory that `acquire` reports
    try:
        lock = _try_lock(descriptor)
        holder = _parse_holder(os.pread(descriptor, RECORD_BYTES, 0))
    finally:
        os.close(descriptor)
    return lock == "taken" or (lock == "none" and holder is not None and holder.alive_here), holder


def lease_fence(path: Path, number: int) -> Callable[[], None]:
    """Return a check that raises LeaseLost unless the lease still has this number.

    It opens the file each time, which invalidates the cache of a network file system.
    """

    def check() -> None:
        try:
            holder = _parse_holder(path.read_bytes())
        except OSError:
            holder = None
        if holder is None or holder.number != number:
            raise LeaseLost(
                f"another launch of this run has taken over ({holder or 'its lease file cannot be read'})",
                field=str(path.parent),
                hint="This one stops without writing.",
            )

    return check


def _try_lock(descriptor: int) -> Literal["held", "taken", "none"]:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "taken"
    except OSError as error:
        if error.errno not in LOCKING_UNSUPPORTED:
            raise
        return "none"
    return "held"


def _parse_holder(content: bytes) -> LeaseHolder | None:
    try:
        return LeaseHolder(**json.loads(content))
    except (ValueError, TypeError):
        return None


def _write_holder(descriptor: int, number: int) -> None:
    """Write in place, because the lock belongs to the file; a write of fixed length is never read in part."""
    holder = LeaseHolder(number, socket.gethostname(), os.getpid(), start_ticks(os.getpid()), time.time())
    record = json.dumps(asdict(holder)).encode()
    assert len(record) < RECORD_BYTES, "a host name has at most 255 bytes"
    os.pwrite(descriptor, record.ljust(RECORD_BYTES - 1) + b"\n", 0)
    os.fsync(descriptor)


def _taken_error(path: Path, holder: LeaseHolder | None) -> LeaseTaken:
    return LeaseTaken(
        f"this run is being written by {holder or 'another process'}",
        field=str(path.parent),
        hint="Wait for it, stop it, or choose another run.id.",
    )


def _unwritable_error(path: Path, error: OSError) -> InputError:
    problem = f"cannot write the run directory: {error.strerror}"
    return InputError(problem, field=str(path), hint="Choose another run.workspace.")
