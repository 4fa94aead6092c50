"""One writer per run directory: a lock that dies with its holder, and a number that unmasks late writers.

The lock (flock) is held by the command that a person started and ends with it, even by kill -9; the processes of its
launch know the number by environment. A process of an earlier launch that still
lives for a moment, or on another machine, is caught by the fencing number: every new lease raises it, and whoever
finds another number than its own in the file may not write any more. Where the file system has no locks, a living
holder on this machine is still seen by its process, and the number alone guards against other machines.
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
from podscale.processes import start_ticks

LEASE = "PODSCALE_LEASE"
"""Environment: path of the lease that the launch holds to which this process belongs."""
FENCE = "PODSCALE_FENCE"
"""Environment: its number; absent where nobody has taken it yet."""
PATIENCE = "PODSCALE_LEASE_PATIENCE"
"""Environment: where it is absent, seconds that rank 0 waits for it (see `Lease.acquire`)."""
RECORD_BYTES = 512
LOOK_SECONDS = 0.5
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)

T = TypeVar("T")
logger = logging.getLogger(__name__)


class LeaseLost(PodscaleError):
    """Another launch writes this run directory now."""


class LeaseTaken(InputError):
    """A living launch writes this run directory."""


@dataclass(frozen=True)
class Holder:
    """Who took the lease; `started` tells a process from a later one with the same id (clock ticks since boot)."""

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
    """The right to write a run directory; made by `acquire`, ended by `release` or by the end of the process."""

    def __init__(self, path: Path, number: int, descriptor: int = -1) -> None:
        self.path = path
        self.number = number
        self.check = fence(path, number)
        """Raises LeaseLost where a newer lease exists; cheap enough for every line of a log."""
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, path: Path, patience: float = 0.0) -> "Lease":
        """Takes the lease of `path` (its directory must exist); raises LeaseTaken naming the holder where it is taken.

        patience: seconds to wait for a holder that is about to end.
        """
        return _patiently(lambda: cls._acquire(path), patience)

    @classmethod
    def _acquire(cls, path: Path) -> "Lease":
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            lock = _lock(descriptor)
            previous = _parse(os.pread(descriptor, RECORD_BYTES, 0))
            if lock == "taken" or (lock == "none" and previous and previous.alive_here):
                raise _taken(path, previous)
            number = previous.number + 1 if previous else 1
            _write(descriptor, number)
            return cls(path, number, descriptor)
        except OSError as error:  # a full disk
            os.close(descriptor)
            raise _unwritable(path, error) from error
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def hold(cls, path: Path, environment: Mapping[str, str] = os.environ, patience: float = 0.0) -> "Lease":
        """The lease of the launch that this process belongs to (see `variables`), else as `acquire`.

        Raises LeaseLost where a newer launch has taken over meanwhile.
        """
        if FENCE not in environment or Path(environment.get(LEASE, "")) != path.absolute():
            return cls.acquire(path, patience)
        joined = cls(path, int(environment[FENCE]))
        joined.check()
        return joined

    @property
    def variables(self) -> dict[str, str]:
        """What the processes of this launch need in their environment, so that they `hold` this lease too."""
        return {LEASE: str(self.path.absolute()), FENCE: str(self.number)}

    def release(self) -> None:
        """Lets others in; the number stays, so that the next is higher. Safe to call twice."""
        if self._descriptor >= 0:
            # A child between fork and exec still shares the open file: unlock, do not only close.
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def refuse_taken(path: Path, patience: float = 0.0) -> None:
    """Raises LeaseTaken naming the holder where a living launch holds the lease of `path`; changes nothing.

    patience: seconds to wait for a holder that is about to end.
    """

    def look() -> None:
        held, holder = _look(path)
        if held:
            raise _taken(path, holder)

    _patiently(look, patience)


def _patiently(attempt: Callable[[], T], seconds: float) -> T:
    """What the attempt returns, made again while the lease is taken, for so long."""
    until, told = time.monotonic() + seconds, False
    while True:
        try:
            return attempt()
        except LeaseTaken as taken:
            if time.monotonic() >= until:
                raise
            if not told:
                logger.warning("%s: %s. Waiting for its end, up to %.0f s", taken.field, taken.problem, seconds)
                told = True
        time.sleep(LOOK_SECONDS)


def is_held(path: Path) -> bool:
    """Whether a living launch holds the lease of `path`; changes nothing."""
    return _look(path)[0]


def _look(path: Path) -> tuple[bool, Holder | None]:
    """Whether the lease is held, and who took it last."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False, None  # no lease yet, or a place that `acquire` complains about
    try:
        lock = _lock(descriptor)
        holder = _parse(os.pread(descriptor, RECORD_BYTES, 0))
    finally:
        os.close(descriptor)
    return lock == "taken" or (lock == "none" and holder is not None and holder.alive_here), holder


def fence(path: Path, number: int) -> Callable[[], None]:
    """A check for any process of the launch that holds lease `number`: raises LeaseLost once it is no longer the one.

    It opens and reads 512 bytes (opening is what makes a network file system look again).
    """

    def check() -> None:
        try:
            holder = _parse(path.read_bytes())
        except OSError:
            holder = None
        if holder is None or holder.number != number:
            raise LeaseLost(
                f"another launch of this run has taken over ({holder or 'the lease file is gone'})",
                field=str(path.parent),
                hint="This one stops without writing.",
            )

    return check


def _lock(descriptor: int) -> Literal["held", "taken", "none"]:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "taken"
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return "none"
    return "held"


def _parse(content: bytes) -> Holder | None:
    try:
        return Holder(**json.loads(content))
    except (ValueError, TypeError):
        return None


def _write(descriptor: int, number: int) -> None:
    """In place, since the lock belongs to the file itself; one write of one length, so that no reader sees half."""
    holder = Holder(number, socket.gethostname(), os.getpid(), start_ticks(os.getpid()), time.time())
    record = json.dumps(asdict(holder)).encode()
    assert len(record) < RECORD_BYTES, "a host name has at most 255 bytes"
    os.pwrite(descriptor, record.ljust(RECORD_BYTES - 1) + b"\n", 0)
    os.fsync(descriptor)


def _taken(path: Path, holder: Holder | None) -> LeaseTaken:
    return LeaseTaken(
        f"this run is being written by {holder or 'another process'}",
        field=str(path.parent),
        hint="Wait for it, stop it, or choose another run.id.",
    )


def _unwritable(path: Path, error: OSError) -> InputError:
    problem = f"cannot write the run directory: {error.strerror}"
    return InputError(problem, field=str(path), hint="Choose another run.workspace.")
