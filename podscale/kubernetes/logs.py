"""Log of a container as one stream across restarts, new pods and broken connections, with each line once.

The kubelet timestamps every line. A position is the timestamp of the last line shown and the number of lines shown with
it. A reopened stream starts at that second and skips the lines already shown. Timestamps of one node only increase, so
the position is also valid for the next container of the pod.
"""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.errors import ApiError, ApiUnreachable
from podscale.kubernetes.pod_state import first_pod, is_running, main_container, restart_count
from podscale.kubernetes.resources import KubernetesObject, creation_time, name_of, uid_of
from podscale.kubernetes.retry import GrowingPause
from podscale.kubernetes.transport import StreamInterrupted
from podscale.util.formatting import format_count, printable

POLL_SECONDS = 1.0
MAX_REFUSED_SECONDS = 60.0
"""Maximal time between two requests for a log that the API server refuses, seconds."""

_TIMESTAMP_PATTERN = re.compile(rb"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[-+]\d\d:\d\d) ?")

PodChooser = Callable[[Sequence[KubernetesObject]], KubernetesObject | None]
"""Picks the pod whose log is shown."""


@dataclass
class LogPosition:
    """Position in a pod's log.

    Args:
        timestamp_ns: timestamp of the last line shown.
        lines_at_timestamp: number of lines shown with that timestamp.
        restarts: restarts of the container at the last read.
    """

    timestamp_ns: int = 0
    lines_at_timestamp: int = 0
    restarts: int = 0


def newest_pod_named(name: str) -> PodChooser:
    """Return a function that picks the newest pod of a name; operators recreate a lost pod under its name."""
    return lambda pods: max((pod for pod in pods if name_of(pod) == name), key=creation_time, default=None)


class ContainerLog:
    """Reader of the log of one pod's stage container; continues from its last position."""

    def __init__(self, api: ClusterClient, pod: KubernetesObject, notify: Callable[[str], None]) -> None:
        self._api = api
        self._name = name_of(pod)
        self._notify = notify
        self._position = LogPosition()

    def lines(self, pod: KubernetesObject, *, follow: bool) -> Iterator[bytes]:
        """Yield the lines not yet shown, without timestamps; if `follow`, wait for more until the container exits.

        `pod` has the current status. Raises StreamInterrupted (read again), and ApiError if there is no log.
        """
        container = main_container(pod)
        if container is None:
            return
        restarts = restart_count(pod)
        if restarts > self._position.restarts:
            yield from self._previous_container_lines(str(container["name"]), restarts)
        self._position.restarts = restarts
        yield from self._new_lines(str(container["name"]), {"follow": "true"} if follow else {})

    def _previous_container_lines(self, container: str, restarts: int) -> Iterator[bytes]:
        """Yield the rest of the log before the last restart; nodes keep no older logs."""
        missed = restarts - self._position.restarts - 1
        if missed > 0:
            self._notify(
                f"{self._name} restarted {format_count(restarts, 'time')}; the log before the last restart is gone"
            )
        try:
            yield from self._new_lines(container, {"previous": "true"})
        except (ApiError, StreamInterrupted) as error:
            self._notify(f"{self._name}: the end of the log before its restart cannot be read: {error}")

    def _new_lines(self, container: str, options: dict[str, str]) -> Iterator[bytes]:
        query = {"container": container, "timestamps": "true", **options}
        position = self._position
        if position.timestamp_ns:
            since = datetime.fromtimestamp(position.timestamp_ns // 10**9, UTC)
            query["sinceTime"] = since.strftime("%Y-%m-%dT%H:%M:%SZ")
        to_skip, caught_up = position.lines_at_timestamp, not position.timestamp_ns
        for line in self._api.read_log(self._name, query):
            timestamp, text = split_timestamp(line)
            if timestamp is not None and not caught_up:
                if timestamp < position.timestamp_ns:
                    continue
                if timestamp == position.timestamp_ns and to_skip:
                    to_skip -= 1
                    continue
                caught_up = True
            if timestamp is not None:
                is_same = timestamp == position.timestamp_ns
                position.lines_at_timestamp = position.lines_at_timestamp + 1 if is_same else 1
                position.timestamp_ns = timestamp
            yield text


class LogFollower:
    """Prints the log of one pod and its successors from a background thread.

    Args:
        pods: returns the job's current pods.
        notify: called with notices for the user.
    """

    def __init__(
        self,
        api: ClusterClient,
        pods: Callable[[], Sequence[KubernetesObject]],
        print_line: Callable[[str], None],
        notify: Callable[[str], None],
        choose: PodChooser = first_pod,
    ) -> None:
        self._api = api
        self._pods = pods
        self._print_line = print_line
        self._notify = notify
        self._choose = choose
        self._logs: dict[str, ContainerLog] = {}
        self._completed: tuple[str, int] | None = None
        """Uid and restarts of the container whose log was read after its exit."""
        self._refused: tuple[str, int] | None = None
        """Uid and restarts of the container whose log was refused last."""
        self._refused_pause = GrowingPause(POLL_SECONDS, MAX_REFUSED_SECONDS)
        self._is_finishing = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="log of a pod", daemon=True)
        self._thread.start()

    def finish(self, timeout_seconds: float) -> None:
        """Print the rest of the log, within a timeout."""
        self._is_finishing.set()
        self._thread.join(timeout_seconds)

    def close(self) -> None:
        """Print no more lines; the thread exits at the next line, or when the stream of the log ends."""
        self._is_closed = True
        self._is_finishing.set()

    def _run(self) -> None:
        with suppress(ApiError, ApiUnreachable):  # the thread that waits for the job raises it as well
            while not self._is_closed:
                is_last = self._is_finishing.is_set()
                if self._print_new_lines() and is_last:
                    return
                self._is_finishing.wait(POLL_SECONDS)

    def _print_new_lines(self) -> bool:
        """Print the new lines; return whether the log is complete so far."""
        pod = self._choose(self._pods())
        container = main_container(pod) if pod is not None else None
        if pod is None or container is None:
            return True
        uid, restarts, running = uid_of(pod), restart_count(pod), is_running(pod)
        if self._completed == (uid, restarts) or ("waiting" in (container.get("state") or {}) and not restarts):
            return True
        is_refused = self._refused == (uid, restarts)
        if is_refused and not self._refused_pause.is_over and not self._is_finishing.is_set():
            return True
        log = self._logs.setdefault(uid, ContainerLog(self._api, pod, self._notify))
        try:
            for line in log.lines(pod, follow=True):
                if self._is_closed:
                    return True
                self._print_line(printable(line))
        except StreamInterrupted:
            self._refused = None
            return False
        except ApiError:  # the pod is gone, its node has no log yet, or its logs may not be read
            self._refused = (uid, restarts)
            self._refused_pause.attempted(in_vain=is_refused)
            return True
        self._refused = None
        if not running:
            self._completed = (uid, restarts)
        return not running


def split_timestamp(line: bytes) -> tuple[int | None, bytes]:
    """Return the timestamp of a line in nanoseconds since 1970 and the line without it; None without a timestamp."""
    match = _TIMESTAMP_PATTERN.match(line)
    if match is None:
        return None, line
    second, fraction, zone = (part.decode() if part else "" for part in match.groups())
    moment = datetime.fromisoformat(second + ("+00:00" if zone == "Z" else zone))
    return int(moment.timestamp()) * 10**9 + int(fraction.ljust(9, "0")), line[match.end() :]
