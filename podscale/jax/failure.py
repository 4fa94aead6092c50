"""How a collective of JAX fails because of another rank: what `engine.failure` must know to name the culprit."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from podscale.distributed import failure_report
from podscale.distributed.progress_tracker import ProgressTracker
from podscale.distributed.rank_group import RankGroup
from podscale.distributed.store import StoreError, StoreTimeout
from podscale.errors import HangDetected, PeerLost, PodscaleError

_COLLECTIVES = ("gloo", "nccl", "collective", "coordination", "distributed service", "barrier")
_TIMED_OUT = ("timed out", "timeout", "deadline")
_PEER_LOST = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "peer",
    "socket",
    "unavailable",
)


def watch_jax_peers(
    rank_group: RankGroup,
    exit_process: Callable[[PodscaleError], None],
    *,
    interval_seconds: float | None = None,
    hang_seconds: float | None = None,
    stack_directory: Path | None = None,
) -> AbstractContextManager[ProgressTracker]:
    """`engine.failure.watched` for JAX's collectives, which wait on the device, on a CPU without end."""
    return failure_report.watch_peers(
        rank_group,
        exit_process,
        classify_error=classify_error,
        silent_collectives=True,
        interval_seconds=interval_seconds,
        hang_seconds=hang_seconds,
        stack_directory=stack_directory,
    )


def classify_error(error: BaseException) -> type[PodscaleError] | None:
    """HangDetected or PeerLost where a collective raised `error` because of another rank, else None.

    On a CPU JAX hands gloo's errors on as ValueError.
    """
    if isinstance(error, StoreError):
        return HangDetected if isinstance(error, StoreTimeout) else PeerLost
    text = str(error).lower()
    if not isinstance(error, RuntimeError | ValueError) or isinstance(error, PodscaleError):
        return None
    if not any(word in text for word in _COLLECTIVES):
        return None
    if any(words in text for words in _TIMED_OUT):
        return HangDetected
    return PeerLost if any(words in text for words in _PEER_LOST) else None
