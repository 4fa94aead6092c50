"""Classification of JAX collective errors, for `distributed.failure_report` to name the lost rank.

If process 0 is lost, a thread of JAX aborts all other processes by SIGABRT (jaxlib 0.10,
xla/pjrt/distributed/client.h; Python cannot replace the callback, since its argument has no Python type). `delay_abort`
makes that thread wait, so that the main thread, whose collective fails at the same time, can report the lost rank. In
the main thread SIGABRT is a failed check of XLA and aborts at once.
"""

import ctypes
import signal
import threading
import time

from podscale.distributed.failure_report import CollectiveFailures
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


def collective_failures() -> CollectiveFailures:
    """Return the classification of the errors of JAX's collectives, for `failure_report.PeerWatch`.

    They wait on the device and may raise no error.
    """
    return CollectiveFailures(classify_error, silent=True)


def classify_error(error: BaseException) -> type[PodscaleError] | None:
    """Return HangDetected or PeerLost if a collective raised `error` because of another rank, else None.

    On a CPU JAX raises gloo's errors as ValueError.
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


ABORT_DELAY_SECONDS = 30.0
"""Delay of SIGABRT, seconds: longer than the failure report takes and than the supervisor waits for it."""


def _delay_signal(number: int) -> None:
    """Handle a signal in C: Python's own handlers run in the main thread, after this one has returned."""
    signal_of_c = ctypes.CDLL(None).signal
    if threading.get_ident() != threading.main_thread().ident:
        time.sleep(ABORT_DELAY_SECONDS)
    signal_of_c(number, ctypes.c_void_p(0))  # the default handler: abort() continues when this returns


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(_delay_signal)


def delay_abort() -> None:
    """Delay SIGABRT in threads of JAX by ABORT_DELAY_SECONDS, from now on."""
    ctypes.CDLL(None).signal(int(signal.SIGABRT), _HANDLER)
