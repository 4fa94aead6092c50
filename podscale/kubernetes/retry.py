"""Retry policy of requests to the API server, by tenacity, and the notices of an outage.

The user gets one line when an outage has lasted NOTICE_AFTER_SECONDS, and one when it is over, however many threads
retry.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_before_delay,
    wait_exponential,
    wait_random,
)

from podscale.kubernetes.errors import ApiUnreachable

NOTICE_AFTER_SECONDS = 5.0
"""Duration of an outage after which the user is notified, seconds."""

MAX_PAUSE_SECONDS = 20.0
"""Maximal pause between two attempts, seconds."""

Notify = Callable[[str], None]
"""Takes one line for the user."""


@dataclass(frozen=True)
class RetryPolicy:
    """Time limits of a request.

    Args:
        deadline: maximal time from the first attempt to the last, seconds; 0 for one attempt.
        read_timeout: timeout of one answer, seconds.
        first_pause: pause after the first attempt, seconds. It doubles with each attempt, to MAX_PAUSE_SECONDS.
    """

    deadline: float
    read_timeout: float = 60.0
    first_pause: float = 0.5

    def retrying(self, notice: "OutageNotice") -> Retrying:
        """Return tenacity's Retrying, which calls a function again while it raises ApiUnreachable."""
        pause = wait_exponential(self.first_pause, max=MAX_PAUSE_SECONDS) + wait_random(0.0, self.first_pause / 2)

        def seconds(state: RetryCallState) -> float:
            return min(self.deadline, _error(state).retry_for)

        def report(state: RetryCallState) -> None:
            if (state.seconds_since_start or 0.0) > NOTICE_AFTER_SECONDS:
                notice.outage_started(_error(state).notice, state.start_time, seconds(state))

        return Retrying(
            retry=retry_if_exception_type(ApiUnreachable),
            wait=lambda state: max(_error(state).retry_after, pause(state)),
            stop=lambda state: stop_before_delay(seconds(state))(state),
            before_sleep=report,
            reraise=True,
        )


INTERACTIVE = RetryPolicy(15.0, read_timeout=15.0)
"""Policy of commands whose user waits at the terminal."""
UNATTENDED = RetryPolicy(1800.0)
"""Policy of commands that follow a job, which continues during an outage."""


class GrowingPause:
    """Pause between two attempts, which doubles with each attempt that brought nothing.

    Args:
        first: first pause, seconds.
        longest: maximal pause, seconds.
    """

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._pause = first
        self._attempted_at = float("-inf")

    @property
    def is_over(self) -> bool:
        """True if the next attempt may be made."""
        return time.monotonic() - self._attempted_at >= self._pause

    def attempted(self, *, in_vain: bool) -> None:
        """Begin the pause after an attempt."""
        is_repeated = in_vain and self._attempted_at > float("-inf")
        self._pause = min(2 * self._pause, self._longest) if is_repeated else self._first
        self._attempted_at = time.monotonic()

    def shorten(self) -> None:
        """Make the present pause as short as the first one."""
        self._pause = self._first


class OutageNotice:
    """Notifies once that the API server does not answer, and once that it answers again; thread-safe."""

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self._lock = threading.Lock()
        self._since: float | None = None

    def outage_started(self, reason: str, since: float, retry_seconds: float) -> None:
        """Notify of an outage that began at `since` (monotonic clock, seconds), unless notified already."""
        with self._lock:
            if self._since is None:
                self._since = since
                minutes = max(1, round(retry_seconds / 60))
                self._notify(f"{reason}; retrying for {minutes} min. Jobs on the cluster run on")

    def outage_ended(self) -> None:
        """Notify of the end of a notified outage."""
        with self._lock:
            if self._since is not None:
                self._notify(f"the API server answers again, after {time.monotonic() - self._since:.0f} s")
                self._since = None


def _error(state: RetryCallState) -> ApiUnreachable:
    error = state.outcome.exception() if state.outcome is not None else None
    assert isinstance(error, ApiUnreachable), "only this class is retried"
    return error
