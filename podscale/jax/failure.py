"""How a collective of JAX fails because of another rank: what `engine.failure` must know to name the culprit."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from podscale.engine import failure
from podscale.engine.meeting import RankGroup
from podscale.engine.notes import ProgressTracker
from podscale.errors import HangDetected, PeerLost, PodscaleError
from podscale.store import StoreError, StoreTimeout

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
    return failure.watch_peers(
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
