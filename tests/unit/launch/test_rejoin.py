"""A restarted container waits for the others to exit; the pod barrier waits for all pods. With real stores."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from podscale.config import RunConfig
from podscale.distributed.store import FAILED_KEY, StoreClient, StoreError
from podscale.launch import rejoin
from podscale.launch.rejoin import BarrierTimeout, pod_barrier
from podscale.launch.rendezvous import Rendezvous
from podscale.launch.worker_spec import WorkerSpec
from tests.support.polling import until
from tests.support.ports import free_port

IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.fixture
def first_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """Open a listening socket in place of the first pod's store."""
    monkeypatch.setattr(rejoin.tempfile, "gettempdir", lambda: str(tmp_path))
    return socket.create_server(("127.0.0.1", 0))


def task(first_pod: socket.socket, node_rank: int | None = 1) -> WorkerSpec:
    rendezvous = Rendezvous(nodes=2, node_rank=node_rank, address="127.0.0.1", port=first_pod.getsockname()[1])
    return WorkerSpec(RunConfig(), "train", "shards", rendezvous)


def seconds_of(task: WorkerSpec, environment: dict[str, str] = IN_A_POD) -> float:
    started = time.monotonic()
    rejoin.wait_to_rejoin(task, lambda: False, environment)
    return time.monotonic() - started


def test_a_first_start_joins_at_once(first_pod: socket.socket) -> None:
    with first_pod:
        assert seconds_of(task(first_pod)) < 0.4


def test_a_restarted_container_waits_until_the_old_rendezvous_has_ended(first_pod: socket.socket) -> None:
    assert seconds_of(task(first_pod)) < 0.4
    threading.Timer(0.6, first_pod.close).start()
    assert 0.5 < seconds_of(task(first_pod)) < 5


def test_it_waits_no_longer_than_an_end_takes(first_pod: socket.socket) -> None:
    """The store may already be the new one, which waits for this pod."""
    with first_pod:
        started = time.monotonic()
        rejoin.wait_until_unreachable("127.0.0.1", first_pod.getsockname()[1], lambda: False, timeout_seconds=0.5)
        assert 0.5 <= time.monotonic() - started < 4


def test_a_request_to_stop_ends_the_waiting(first_pod: socket.socket) -> None:
    with first_pod:
        seconds_of(task(first_pod))
        started = time.monotonic()
        rejoin.wait_to_rejoin(task(first_pod), lambda: True, IN_A_POD)
        assert time.monotonic() - started < 1


@pytest.mark.parametrize("node_rank", [0, None])
def test_the_first_pod_and_an_elastic_pod_never_wait(first_pod: socket.socket, node_rank: int) -> None:
    with first_pod:
        assert [seconds_of(task(first_pod, node_rank)) < 0.4 for _ in range(2)] == [True, True]


def test_outside_of_pods_nothing_is_done(first_pod: socket.socket) -> None:
    with first_pod:
        assert [seconds_of(task(first_pod), environment={}) < 0.4 for _ in range(2)] == [True, True]


TIMEOUT = 30.0
SERVE = """
import sys, time
from podscale.distributed.store import StoreServer
StoreServer("127.0.0.1", int(sys.argv[1]))
print("serving", flush=True)
time.sleep(600)
"""


class BarrierStore:
    """The store of the first pod, which restarts with that pod."""

    def __init__(self) -> None:
        self._port = free_port()
        self._pool = ThreadPoolExecutor()
        self._server = self._serve()

    def _serve(self) -> "subprocess.Popen[str]":
        server = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(self._port)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        assert server.stdout.readline() == "serving\n"
        return server

    def store(self) -> StoreClient:
        return StoreClient("127.0.0.1", self._port, TIMEOUT)

    def stop(self) -> None:
        """Stop the processes of the first pod, which closes their connections."""
        self._server.kill()
        self._server.wait()
        if self._server.stdout is not None:
            self._server.stdout.close()

    def restart(self) -> None:
        self.stop()
        self._server = self._serve()

    def join(self, pod: int, *, pods: int = 2, exit_grace: float = TIMEOUT, seconds: float = TIMEOUT) -> "Future[None]":
        """Let a pod join; the future ends when all pods have joined, or with the error."""
        rendezvous = Rendezvous(pods, pod, "127.0.0.1", self._port)
        return self._pool.submit(
            pod_barrier, rendezvous, self.store, 4 * pod, exit_grace_seconds=exit_grace, timeout_seconds=seconds
        )

    def join_all(self) -> None:
        for joined in [self.join(pod) for pod in range(2)]:
            joined.result(TIMEOUT)


@pytest.fixture
def barrier() -> Iterator[BarrierStore]:
    store = BarrierStore()
    yield store
    store.stop()


def test_pods_wait_for_all(barrier: BarrierStore) -> None:
    waiting = [barrier.join(2, pods=3), barrier.join(0, pods=3)]
    until(lambda: barrier.store().has("pod/0") and barrier.store().has("pod/2"))
    assert not any(joined.done() for joined in waiting)
    barrier.join(1, pods=3).result(TIMEOUT)
    for joined in waiting:
        joined.result(TIMEOUT)


def test_who_does_not_come_is_named(barrier: BarrierStore) -> None:
    with pytest.raises(BarrierTimeout, match="1 and 2 of 3") as caught:
        barrier.join(0, pods=3, seconds=0.1).result(TIMEOUT)
    assert caught.value.missing == (1, 2)


def test_a_pod_that_died_before_all_had_come_is_no_other_one(barrier: BarrierStore) -> None:
    with pytest.raises(BarrierTimeout):
        barrier.join(1, seconds=0.1).result(TIMEOUT)
    again = barrier.join(1)
    until(lambda: barrier.store().get(["pod/1"]) == ["2"])
    barrier.join(0).result(TIMEOUT)
    again.result(TIMEOUT)


def test_a_restarted_pod_joins_the_next_rendezvous(barrier: BarrierStore) -> None:
    """The other pods are not stopped before the grace period, because they may be saving."""
    barrier.join_all()
    rejoined = barrier.join(1)
    until(lambda: barrier.store().add("came/pod/1", 0) == 2)
    barrier.restart()
    until(lambda: barrier.store().has("pod/1"))
    assert not rejoined.done()
    assert not barrier.store().has(FAILED_KEY)
    barrier.join(0).result(TIMEOUT)
    rejoined.result(TIMEOUT)


def test_pods_that_go_on_without_it_are_stopped_after_the_grace_period(barrier: BarrierStore) -> None:
    """The other pods cannot detect the exit of a pod whose machine is gone."""
    barrier.join_all()
    rejoined = barrier.join(1, exit_grace=0.1)
    until(lambda: barrier.store().has(FAILED_KEY))
    assert barrier.store().get([FAILED_KEY]) == ["4"], "the first rank of that pod"
    assert not rejoined.done()
    barrier.stop()
    with pytest.raises(StoreError):
        barrier.store().clone(0.1).has(FAILED_KEY)
    barrier.restart()
    barrier.join(0).result(TIMEOUT)
    rejoined.result(TIMEOUT)


def test_others_that_never_end_are_an_error(barrier: BarrierStore) -> None:
    barrier.join_all()
    with pytest.raises(BarrierTimeout) as caught:
        barrier.join(1, exit_grace=0.1, seconds=0.1).result(TIMEOUT)
    assert caught.value.missing == (), "all have come: it is the end of their training that is waited for"
