"""JAX's own answer to a lost process, put off until ours was given.

Where process 0 is lost, a thread of JAX ends all others by SIGABRT (jaxlib 0.10, xla/pjrt/distributed/client.h;
a callback in its place cannot be given from Python: its argument has no Python type). That thread is made to wait, so
that the main thread, whose collective fails at the same time, can say who was lost and where. After that SIGABRT takes
its course, and in the main thread at once: there it is a failed check of XLA.
"""

import ctypes
import signal
import threading
import time

ABORT_DELAY_SECONDS = 30.0
"""Longer than a failure needs to be explained (see engine.pulse), and than the supervisor waits for it."""


def _delay_signal(number: int) -> None:
    """Python's own handlers run in the main thread, once this one would have returned: too late."""
    signal_of_c = ctypes.CDLL(None).signal
    if threading.get_ident() != threading.main_thread().ident:
        time.sleep(ABORT_DELAY_SECONDS)
    signal_of_c(number, ctypes.c_void_p(0))  # the default: what aborts goes on when this returns


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(_delay_signal)


def delay_abort() -> None:
    """SIGABRT in a thread of JAX lets the main thread go on for `GRACE_SECONDS`, from now on."""
    ctypes.CDLL(None).signal(int(signal.SIGABRT), _HANDLER)
