"""A pod whose container was started again waits until the others have ended too."""

import socket
import threading
import time
from pathlib import Path

import pytest

from podscale.config import RunConfig
from podscale.launch import rejoin
from podscale.launch.rendezvous import Rendezvous
from podscale.launch.worker_spec import WorkerSpec

IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """A meeting place that answers."""
    monkeypatch.setattr(rejoin.tempfile, "gettempdir", lambda: str(tmp_path))
    return socket.create_server(("127.0.0.1", 0))


def task(place: socket.socket, node_rank: int | None = 1) -> WorkerSpec:
    rendezvous = Rendezvous(nodes=2, node_rank=node_rank, address="127.0.0.1", port=place.getsockname()[1])
    return WorkerSpec(RunConfig(), "train", "shards", rendezvous)


def seconds_of(task: WorkerSpec, environment: dict[str, str] = IN_A_POD) -> float:
    started = time.monotonic()
    rejoin.wait_to_rejoin(task, lambda: False, environment)
    return time.monotonic() - started


def test_a_first_start_joins_at_once(place: socket.socket) -> None:
    with place:
        assert seconds_of(task(place)) < 0.4


def test_a_container_that_comes_back_waits_until_the_old_meeting_has_ended(place: socket.socket) -> None:
    assert seconds_of(task(place)) < 0.4
    threading.Timer(1.0, place.close).start()
    assert 0.9 < seconds_of(task(place)) < 5


def test_it_waits_no_longer_than_an_end_takes(place: socket.socket) -> None:
    """The meeting place may be a new one already, which waits for this pod."""
    with place:
        started = time.monotonic()
        rejoin.wait_until_unreachable("127.0.0.1", place.getsockname()[1], lambda: False, timeout_seconds=1)
        assert 1 <= time.monotonic() - started < 4


def test_a_request_to_stop_ends_the_waiting(place: socket.socket) -> None:
    with place:
        seconds_of(task(place))
        started = time.monotonic()
        rejoin.wait_to_rejoin(task(place), lambda: True, IN_A_POD)
        assert time.monotonic() - started < 1


@pytest.mark.parametrize("node_rank", [0, None])
def test_who_is_the_meeting_place_or_finds_it_by_rendezvous_never_waits(place: socket.socket, node_rank: int) -> None:
    with place:
        assert [seconds_of(task(place, node_rank)) < 0.4 for _ in range(2)] == [True, True]


def test_outside_of_pods_nothing_is_done(place: socket.socket) -> None:
    with place:
        assert [seconds_of(task(place), environment={}) < 0.4 for _ in range(2)] == [True, True]
