"""How long a request is repeated while the API server does not answer, and how long to wait in between."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

FIRST_DELAY = 0.5
LONGEST_DELAY = 20.0

Tell = Callable[[str], None]
"""Takes one line for people."""


@dataclass(frozen=True)
class Patience:
    """seconds: how long an outage may last before it is an error; answer: the longest wait for one answer."""

    seconds: float
    answer: float = 60.0


BRIEF = Patience(15.0, answer=15.0)
"""For commands whose reader waits at the terminal."""
LONG = Patience(1800.0)
"""For those that accompany a job: it goes on without us, so an outage costs nothing but waiting."""


QUIET_SECONDS = 5.0
"""Shorter outages are not worth a line."""


class Announcer:
    """Tells once that the API server does not answer and once that it does again, however many threads notice."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._since: float | None = None

    def down(self, why: str, since: float, patience: Patience) -> None:
        with self._lock:
            if self._since is None:
                self._since = since
                minutes = max(1, round(patience.seconds / 60))
                self._tell(f"{why}; trying again for {minutes} min. What runs on the cluster runs on")

    def up(self) -> None:
        with self._lock:
            if self._since is not None:
                self._tell(f"the API server answers again, after {time.monotonic() - self._since:.0f} s")
                self._since = None


class Outage:
    """The failed attempts of one request: how long to wait before the next, and when patience is over."""

    def __init__(self, patience: Patience, announcer: Announcer, sleep: Callable[[float], None] = time.sleep) -> None:
        self._patience = patience
        self._announcer = announcer
        self._sleep = sleep
        self._began = time.monotonic()
        self._delay = FIRST_DELAY

    def endured(self, why: str, *, advised: float = 0.0, at_most: float | None = None) -> bool:
        """Waits for the next attempt; False where patience is over.

        advised: seconds that the server asked for; at_most: of patience, where more would be in vain.
        """
        now = time.monotonic()
        patience = self._patience
        if at_most is not None and at_most < patience.seconds:
            patience = replace(patience, seconds=at_most)
        delay = max(advised, self._delay * random.uniform(0.75, 1.25))
        if now + delay - self._began > patience.seconds:
            return False
        if now - self._began > QUIET_SECONDS:
            self._announcer.down(why, self._began, patience)
        self._delay = min(self._delay * 2, LONGEST_DELAY)
        self._sleep(delay)
        return True
