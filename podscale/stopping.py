"""A request to stop (SIGTERM), for work that can be given up at any moment because its products appear at once.

Training is not of that kind: its ranks look at a flag between updates (see podscale.engine.stop), and the supervisor
waits for them.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from podscale.errors import Preempted

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
