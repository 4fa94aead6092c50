"""Memory that the processes of a pod share: a file without a name (memfd), so none of it outlives the last process."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def shared_memory(name: str, size: int) -> Iterator[str | None]:
    """Yield the path of new shared memory of `size` bytes, all zero; None if `size` is 0 or the system has none.

    Processes of the same user in the same pod can map it during the block, and use it until they exit. Its pages take
    memory from the first write on. They count towards the pod's memory, and not towards the size of /dev/shm.
    """
    if not size:
        yield None
        return
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):  # not Linux, or not allowed
        yield None
        return
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}" if _set_size(descriptor, size) else None
    finally:
        os.close(descriptor)


def _set_size(descriptor: int, size: int) -> bool:
    """Set the size of a memfd for good; return False if it is larger than the system allows."""
    try:
        os.ftruncate(descriptor, size)
    except (OSError, OverflowError):
        return False
    # A mapped page beyond the end of a file would kill the process that reads it.
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return True


def map_shared(path: str) -> mmap.mmap:
    """Map the shared memory of another process, for reading and writing; raises OSError or ValueError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    return mapped
