"""The log of rank 0 as one stream: every line once, across restarts, new pods and broken connections."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from podscale.kubernetes import logs
from podscale.kubernetes.client import ClusterClient
from podscale.kubernetes.errors import ApiError, ApiUnreachable
from podscale.kubernetes.logs import ContainerLog, LogFollower, split_timestamp
from podscale.kubernetes.resources import PODS
from podscale.kubernetes.transport import StreamInterrupted
from tests.support.cluster_objects import pod, terminated
from tests.support.fake_cluster import FakeCluster
from tests.support.polling import until

POD = "r1-worker-0"
SECOND = "2026-11-21T12:00:00"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.02)


@contextmanager
def following(api: ClusterClient, notices: list[str]) -> Iterator[tuple[LogFollower, list[str]]]:
    shown: list[str] = []
    follower = LogFollower(api, lambda: api.list(PODS)[0], shown.append, notices.append)
    yield follower, shown
    follower.finish(5.0)


def numbers(shown: list[str]) -> list[int]:
    return [int(line.removeprefix("line ")) for line in shown]


def test_lines_are_shown_as_they_come_and_the_end_is_not_lost(
    api: ClusterClient, cluster: FakeCluster, notices: list[str]
) -> None:
    cluster.put("pods", pod(0))
    cluster.say(POD, "line 0")
    with following(api, notices) as (_, shown):
        until(lambda: shown == ["line 0"])
        cluster.say(POD, "line 1")
        until(lambda: len(shown) == 2)
        cluster.say(POD, "line 2")
        cluster.hang_up(POD)
        cluster.put("pods", pod(0, state=terminated(0, "", "Completed"), phase="Succeeded"))
    assert numbers(shown) == [0, 1, 2]


def test_broken_connections_lose_and_repeat_nothing(
    api: ClusterClient, cluster: FakeCluster, notices: list[str]
) -> None:
    cluster.put("pods", pod(0))
    with following(api, notices) as (_, shown):
        for number in range(200):
            cluster.say(POD, f"line {number}")
            if number % 20 == 0:
                until(lambda: bool(shown))
                cluster.cut()
        until(lambda: len(shown) >= 200)
        cluster.hang_up(POD)
        cluster.put("pods", pod(0, state=terminated(0), phase="Succeeded"))
    assert numbers(shown) == list(range(200))


def test_lines_of_one_instant_are_each_shown_once(api: ClusterClient, cluster: FakeCluster, notices: list[str]) -> None:
    """Many lines may have the same timestamp, and the API accepts only whole seconds as a start."""
    cluster.put("pods", pod(0))
    log = ContainerLog(api, pod(0), notices.append)
    for number in range(3):
        cluster.say(POD, f"line {number}", f"{SECOND}.500000000Z")
    assert numbers([line.decode() for line in log.lines(pod(0), follow=False)]) == [0, 1, 2]
    for number, stamp in ((3, "500000000"), (4, "500000000"), (5, "500000001")):
        cluster.say(POD, f"line {number}", f"{SECOND}.{stamp}Z")
    assert numbers([line.decode() for line in log.lines(pod(0), follow=False)]) == [3, 4, 5]


def test_a_restart_behind_a_broken_connection_still_shows_the_last_lines(
    api: ClusterClient, cluster: FakeCluster, notices: list[str]
) -> None:
    cluster.put("pods", pod(0))
    log = ContainerLog(api, pod(0), notices.append)
    cluster.say(POD, "line 0")
    assert len(list(log.lines(pod(0), follow=False))) == 1
    cluster.say(POD, "line 1")
    cluster.restart(POD)
    cluster.say(POD, "line 2")
    after = pod(0, last=terminated(1), restarts=1)
    assert list(log.lines(after, follow=False)) == [b"line 1", b"line 2"]
    assert notices == []


def test_unread_containers_are_reported_as_lost(api: ClusterClient, cluster: FakeCluster, notices: list[str]) -> None:
    log = ContainerLog(api, pod(0), notices.append)
    cluster.say(POD, "line 0")
    cluster.restart(POD)
    cluster.restart(POD)
    cluster.say(POD, "line 1")
    cluster.restart(POD)
    cluster.say(POD, "line 2")
    assert list(log.lines(pod(0, restarts=3), follow=False)) == [b"line 1", b"line 2"]
    assert len(notices) == 1


def test_restarts_and_a_new_pod_are_one_stream(api: ClusterClient, cluster: FakeCluster, notices: list[str]) -> None:
    cluster.put("pods", pod(0))
    with following(api, notices) as (_, shown):
        cluster.say(POD, "line 0")
        until(lambda: len(shown) == 1)
        cluster.restart(POD)
        cluster.put("pods", pod(0, last=terminated(77), restarts=1))
        cluster.say(POD, "line 1")
        until(lambda: len(shown) == 2)
        cluster.logs.pop(POD)
        cluster.cut()
        cluster.remove("pods", POD)
        cluster.put("pods", pod(0, uid="another"))
        cluster.say(POD, "line 2")
        until(lambda: len(shown) == 3)
        cluster.hang_up(POD)
        cluster.put("pods", pod(0, uid="another", state=terminated(0), phase="Succeeded"))
    assert numbers(shown) == [0, 1, 2]


def test_a_container_that_has_ended_is_not_read_again_and_again(
    api: ClusterClient, cluster: FakeCluster, notices: list[str]
) -> None:
    cluster.put("pods", pod(0, state=terminated(1), phase="Failed"))
    cluster.say(POD, "line 0")
    cluster.hang_up(POD)
    with following(api, notices) as (_, shown):
        until(lambda: shown == ["line 0"])
        threading.Event().wait(0.3)
    assert sum(seen.path.endswith("/log") for seen in cluster.seen) == 1


def end_log(cluster: FakeCluster, **changes: Any) -> None:
    cluster.hang_up(POD)
    cluster.put("pods", pod(0, state=terminated(0), phase="Succeeded", **changes))


def log_requests(cluster: FakeCluster) -> int:
    return sum(seen.path.endswith("/log") for seen in cluster.seen)


def test_a_refused_log_is_requested_less_and_less_often(
    api: ClusterClient, cluster: FakeCluster, notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that gives no logs costs the API server few requests, however long the job runs."""
    monkeypatch.setattr(logs, "MAX_REFUSED_SECONDS", 0.2)
    cluster.put("pods", pod(0))
    with following(api, notices) as (_, shown):
        threading.Event().wait(0.8)
        assert 3 <= log_requests(cluster) <= 9  # pauses of 0.02, 0.04, ... 0.2 s; without them about 35
        cluster.say(POD, "line 0")
        until(lambda: shown == ["line 0"])
        end_log(cluster)


def test_the_log_of_a_new_pod_is_requested_at_once_after_a_refusal(
    api: ClusterClient, cluster: FakeCluster, notices: list[str]
) -> None:
    cluster.put("pods", pod(0))
    with following(api, notices) as (_, shown):
        until(lambda: log_requests(cluster) >= 7)  # the next request is due after more than a second
        cluster.remove("pods", POD)
        cluster.put("pods", pod(0, uid="another"))
        cluster.say(POD, "line 0")
        until(lambda: shown == ["line 0"], 1.0)
        end_log(cluster, uid="another")


def test_the_end_of_a_log_is_requested_despite_a_refusal(
    api: ClusterClient, cluster: FakeCluster, notices: list[str]
) -> None:
    cluster.put("pods", pod(0))
    with following(api, notices) as (_, shown):
        until(lambda: log_requests(cluster) >= 6)  # the next request is due after more than half a second
        cluster.say(POD, "line 0")
        end_log(cluster)
    assert numbers(shown) == [0]


def test_a_broken_stream_is_reported(api: ClusterClient, cluster: FakeCluster, notices: list[str]) -> None:
    cluster.say(POD, "line 0")
    lines = ContainerLog(api, pod(0), notices.append).lines(pod(0), follow=True)
    assert next(lines) == b"line 0"
    cluster.cut()
    with pytest.raises(StreamInterrupted):
        next(lines)


@pytest.mark.parametrize("error", [ApiError("no longer permitted", status=403), ApiUnreachable("gone")])
def test_a_lost_job_ends_the_thread_without_a_traceback(
    api: ClusterClient, notices: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The thread that waits for the job raises the same error."""
    tracebacks: list[object] = []
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)

    def pods() -> list[Any]:
        raise error

    follower = LogFollower(api, pods, print, notices.append)
    follower.finish(5.0)
    assert not follower._thread.is_alive()
    assert tracebacks == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"1970-01-01T00:00:01.000000002Z hello", (10**9 + 2, b"hello")),
        (b"1970-01-01T01:00:01.5+01:00 hello", (10**9 + 5 * 10**8, b"hello")),
        (b"1970-01-01T00:00:01Z ", (10**9, b"")),
        (b"unable to retrieve container logs", (None, b"unable to retrieve container logs")),
    ],
)
def test_stamps_are_taken_from_lines(line: bytes, expected: tuple[int | None, bytes]) -> None:
    assert split_timestamp(line) == expected
