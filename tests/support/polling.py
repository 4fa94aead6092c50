"""Polling for a condition that another thread or process fulfils."""

import time
from collections.abc import Callable


def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until `holds()`. Fails after the time limit."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)
