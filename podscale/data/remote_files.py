"""Reads from a remote shard set, with a timeout, and retries with exponential backoff."""

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import fsspec
from tenacity import (
    RetryCallState,
    RetryError,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential,
    wait_random_exponential,
)

from podscale.errors import InputError, PodscaleError
from podscale.util.processes import call_with_timeout

log = logging.getLogger("podscale.data")

T = TypeVar("T")


@dataclass(frozen=True)
class ReadRetryPolicy:
    """Retry policy of one read of `block_bytes`: the pause doubles after each attempt, and half of it is random."""

    timeout_seconds: float = 60.0
    max_attempts: int = 6
    pause_seconds: float = 0.5
    block_bytes: int = 8 * 2**20


class RemoteFiles:
    """Files under an fsspec URL."""

    def __init__(self, location: str, retry_policy: ReadRetryPolicy) -> None:
        self.location = location.rstrip("/")
        self.retry_policy = retry_policy
        self._files: Any
        self._root: str
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.location)
        except (ValueError, ImportError) as error:
            raise InputError(f"cannot open this kind of URL: {error}", field=location) from error

    def read(self, name: str) -> bytes:
        """Return a whole small file; raises FileNotFoundError if there is none."""
        return self._read_with_retries(name, lambda: self._files.cat_file(self._path(name)))

    def blocks(self, name: str, size: int) -> Iterator[bytes]:
        """Yield the first `size` bytes of a file in blocks, so that a lost connection costs one block."""
        for begin in range(0, size, self.retry_policy.block_bytes):
            end = min(begin + self.retry_policy.block_bytes, size)
            yield self._read_with_retries(name, partial(self._read_range, name, begin, end))

    def copy(self, name: str, size: int, sha256: str, write: Callable[[int, bytes], object]) -> None:
        """Copy a file to `write(offset, block)`; start again if its sha256 differs.

        Raises InputError if the file is missing, PodscaleError if it cannot be read or its sha256 still differs.
        """
        for attempt in range(1, self.retry_policy.max_attempts + 1):
            digest, offset = hashlib.sha256(), 0
            try:
                for block in self.blocks(name, size):
                    digest.update(block)
                    write(offset, block)
                    offset += len(block)
            except FileNotFoundError as error:
                raise InputError(
                    "the shard is missing", field=f"{self.location}/{name}", hint="Run `podscale shard`"
                ) from error
            except PermissionError as error:
                raise InputError(f"cannot read the shard: {error}", field=f"{self.location}/{name}") from error
            if digest.hexdigest() == sha256:
                return
            log.warning("%s/%s: sha256 differs from the manifest (attempt %d)", self.location, name, attempt)
        raise PodscaleError(
            f"sha256 differs from the manifest after {self.retry_policy.max_attempts} attempts",
            field=f"{self.location}/{name}",
            hint="Run `podscale shard --verify` on the set.",
        )

    def _read_range(self, name: str, begin: int, end: int) -> bytes:
        data: bytes = self._files.cat_file(self._path(name), start=begin, end=end)
        if len(data) > end - begin:
            raise InputError("the server ignores range requests, which reading shards needs", field=self.location)
        if len(data) < end - begin:
            raise OSError(f"truncated: {len(data)} of {end - begin} bytes")
        return data

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _read_with_retries(self, name: str, read: Callable[[], bytes]) -> bytes:
        policy, file = self.retry_policy, f"{self.location}/{name}"
        half = policy.pause_seconds / 2

        def report(state: RetryCallState) -> None:
            log.warning("%s: %s; trying again (attempt %d)", file, _last_error(state), state.attempt_number)

        retrying = Retrying(
            retry=retry_if_exception(_may_pass),
            stop=stop_after_attempt(policy.max_attempts),
            wait=wait_exponential(half) + wait_random_exponential(half),
            before_sleep=report,
        )
        try:
            content: bytes = retrying(call_with_timeout, policy.timeout_seconds, read)
            return content
        except RetryError as error:
            attempts, last = error.last_attempt.attempt_number, error.last_attempt.exception()
            raise PodscaleError(
                f"could not be read in {attempts} attempts, last error {type(last).__name__}: {last}",
                field=file,
                hint="Check the store and the network, then start the same command again.",
            ) from last


def _may_pass(error: BaseException) -> bool:
    """Return True if a retry may help. Each file system and HTTP client has errors of its own."""
    return isinstance(error, Exception) and not isinstance(error, FileNotFoundError | PermissionError | InputError)


def _last_error(state: RetryCallState) -> str:
    error = state.outcome.exception() if state.outcome is not None else None
    return f"{type(error).__name__}: {error}"
