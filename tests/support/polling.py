"""Waiting for what another thread or process brings about."""

import time
from collections.abc import Callable


def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Returns when `holds()`; fails where it does not within the time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)
