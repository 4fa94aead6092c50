"""Log of a container as one stream through restarts, new pods and broken connections, each line once.

The kubelet timestamps every line. A position is the timestamp of the last line shown and the number of lines shown with
it. A reopened stream starts at that second and skips the lines already shown. Timestamps of one node only grow, so the
position also serves for the next container of the pod.
"""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.errors import ApiError, ApiUnreachable
from podscale.kubernetes.pod_state import creation_time, is_running, main_container, name_of, restart_count
from podscale.kubernetes.resources import KubernetesObject
from podscale.kubernetes.transport import StreamInterrupted
from podscale.util.formatting import format_count, printable

POLL_SECONDS = 1.0
"""Between two looks for something to read."""

_TIMESTAMP_PATTERN = re.compile(rb"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[-+]\d\d:\d\d) ?")
_FIRST_LABELS = (
    ("training.kubeflow.org/replica-index", "0"),
    ("jobset.sigs.k8s.io/job-index", "0"),
    ("batch.kubernetes.io/job-completion-index", "0"),
)
"""Labels of the pod that rank 0 is in, where its operator sets them."""

PodChooser = Callable[[Sequence[KubernetesObject]], KubernetesObject | None]
"""Whose log is shown, of a job's pods."""


@dataclass
class LogPosition:
    """Position in a pod's log: timestamp of the last line shown, nanoseconds, and lines shown with that timestamp."""

    timestamp_ns: int = 0
    lines_at_timestamp: int = 0
    restarts: int = 0
    """Of the container whose log was read last."""


def first_pod(pods: Sequence[KubernetesObject]) -> KubernetesObject | None:
    """Return the newest pod of rank 0, a master or the pod with index 0; None if there is none yet."""
    firsts = [pod for pod in pods if _is_first(pod)]
    masters = [pod for pod in firsts if _labels_of(pod).get("training.kubeflow.org/replica-type") == "master"]
    return max(masters or firsts, key=creation_time, default=None)


def newest_pod_named(name: str) -> PodChooser:
    """Return a function that picks the newest pod of a name: operators recreate a lost pod under its name."""
    return lambda pods: max((pod for pod in pods if name_of(pod) == name), key=creation_time, default=None)


class ContainerLog:
    """Reader of the log of one pod's stage container; continues from its last position."""

    def __init__(self, api: ClusterClient, pod: KubernetesObject, notify: Callable[[str], None]) -> None:
        self._api = api
        self._name = name_of(pod)
        self._notify = notify
        self._position = LogPosition()

    def lines(self, pod: KubernetesObject, *, follow: bool) -> Iterator[bytes]:
        """The lines not yet shown, without stamps; follow: until the container ends or the stream breaks off.

        pod: its newest status. Raises Interrupted where the stream broke off, ApiError where there is no log.
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
        """What the last container said after the connection to it was lost; nodes keep no older one."""
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
        place = self._position
        if place.timestamp_ns:
            since = datetime.fromtimestamp(place.timestamp_ns // 10**9, UTC)
            query["sinceTime"] = since.strftime("%Y-%m-%dT%H:%M:%SZ")
        to_skip, caught_up = place.lines_at_timestamp, not place.timestamp_ns
        for line in self._api.read_log(self._name, query):
            stamp, text = split_timestamp(line)
            if stamp is not None and not caught_up:
                if stamp < place.timestamp_ns:
                    continue
                if stamp == place.timestamp_ns and to_skip:
                    to_skip -= 1
                    continue
                caught_up = True
            if stamp is not None:
                place.lines_at_timestamp = place.lines_at_timestamp + 1 if stamp == place.timestamp_ns else 1
                place.timestamp_ns = stamp
            yield text


class LogFollower:
    """Shows the log of one pod and its successors while a job lives, from a thread of its own.

    pods: the job's pods as last heard of; print_line: takes each line; notify: takes what a person should know besides.
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
        self._read: tuple[str, int] | None = None
        """Uid and restarts of the container whose log was read after it had ended."""
        self._is_finishing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log of a pod", daemon=True)
        self._thread.start()

    def finish(self, timeout_seconds: float) -> None:
        """No more lines will come: shows what is left, and gives up after so many seconds."""
        self._is_finishing.set()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        with suppress(ApiUnreachable):  # whoever waits for the job hears of that too
            while True:
                last = self._is_finishing.is_set()
                if self._print_new_lines() and last:
                    return
                self._is_finishing.wait(POLL_SECONDS)

    def _print_new_lines(self) -> bool:
        """Shows what there is to show; True where the log is shown to its end."""
        pod = self._choose(self._pods())
        container = main_container(pod) if pod is not None else None
        if pod is None or container is None:
            return True
        now = (str(pod["metadata"]["uid"]), restart_count(pod))
        running = is_running(pod)
        if now == self._read or ("waiting" in (container.get("state") or {}) and not now[1]):
            return True
        log = self._logs.setdefault(now[0], ContainerLog(self._api, pod, self._notify))
        try:
            for line in log.lines(pod, follow=True):
                self._print_line(printable(line))
        except StreamInterrupted:
            return False
        except ApiError:  # the pod is gone, or its node has nothing to say yet
            return True
        if not running:
            self._read = now
        return not running


def split_timestamp(line: bytes) -> tuple[int | None, bytes]:
    """Return the timestamp of a line in nanoseconds since 1970 and the line without it; None without a timestamp."""
    found = _TIMESTAMP_PATTERN.match(line)
    if found is None:
        return None, line
    second, fraction, zone = (part.decode() if part else "" for part in found.groups())
    moment = datetime.fromisoformat(second + ("+00:00" if zone == "Z" else zone))
    return int(moment.timestamp()) * 10**9 + int(fraction.ljust(9, "0")), line[found.end() :]


def _labels_of(pod: KubernetesObject) -> dict[str, str]:
    return pod["metadata"].get("labels") or {}


def _is_first(pod: KubernetesObject) -> bool:
    """A label that is absent denies nothing: the pods of a plain Job bear none of them."""
    labels = _labels_of(pod)
    return all(labels.get(name, value) == value for name, value in _FIRST_LABELS)
