"""JAX's pods come together: all of them, once, and none in a meeting that it was lost from. With real stores."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from podscale.distributed.store import FAILED_KEY, StoreClient, StoreError
from podscale.launch.rejoin import BarrierTimeout, pod_barrier
from podscale.launch.rendezvous import Rendezvous
from tests.support.polling import until
from tests.support.ports import free_port

PATIENCE = 30.0
SERVE = """
import sys, time
from podscale.distributed.store import StoreServer
StoreServer("127.0.0.1", int(sys.argv[1]))
print("serving", flush=True)
time.sleep(600)
"""


class Place:
    """A meeting place, at which one store follows another as often as the first pod starts."""

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
        return StoreClient("127.0.0.1", self._port, PATIENCE)

    def end(self) -> None:
        """The first pod's processes end, and their connections with them."""
        self._server.kill()
        self._server.wait()
        if self._server.stdout is not None:
            self._server.stdout.close()

    def begin_again(self) -> None:
        self.end()
        self._server = self._serve()

    def come(self, pod: int, *, pods: int = 2, leaving: float = PATIENCE, seconds: float = PATIENCE) -> "Future[None]":
        """The pod comes; the future holds whether it met all others."""
        meeting = Rendezvous(pods, pod, "127.0.0.1", self._port)
        return self._pool.submit(
            pod_barrier, meeting, self.store, 4 * pod, exit_grace_seconds=leaving, timeout_seconds=seconds
        )

    def meet(self) -> None:
        for came in [self.come(pod) for pod in range(2)]:
            came.result(PATIENCE)


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.end()


def test_pods_wait_for_all(place: Place) -> None:
    early = [place.come(2, pods=3), place.come(0, pods=3)]
    until(lambda: place.store().has("pod/0") and place.store().has("pod/2"))
    assert not any(came.done() for came in early)
    place.come(1, pods=3).result(PATIENCE)
    for came in early:
        came.result(PATIENCE)


def test_who_does_not_come_is_named(place: Place) -> None:
    with pytest.raises(BarrierTimeout, match="pods 1 and 2 of 3") as caught:
        place.come(0, pods=3, seconds=0.1).result(PATIENCE)
    assert caught.value.missing == (1, 2)


def test_a_pod_that_died_before_all_had_come_is_no_other_one(place: Place) -> None:
    with pytest.raises(BarrierTimeout):
        place.come(1, seconds=0.1).result(PATIENCE)
    again = place.come(1)
    until(lambda: place.store().get(["pod/1"]) == ["2"])
    place.come(0).result(PATIENCE)
    again.result(PATIENCE)


def test_a_pod_that_comes_back_joins_the_next_meeting(place: Place) -> None:
    """The others are left in peace meanwhile: they may be saving."""
    place.meet()
    back = place.come(1)
    until(lambda: place.store().add("came/pod/1", 0) == 2)
    place.begin_again()
    until(lambda: place.store().has("pod/1"))
    assert not back.done()
    assert not place.store().has(FAILED_KEY)
    place.come(0).result(PATIENCE)
    back.result(PATIENCE)


def test_who_goes_on_without_the_pod_is_told_after_a_while(place: Place) -> None:
    """The others cannot see the end of a pod whose machine is gone."""
    place.meet()
    back = place.come(1, leaving=0.1)
    until(lambda: place.store().has(FAILED_KEY))
    assert place.store().get([FAILED_KEY]) == ["4"], "the first rank of that pod"
    assert not back.done()
    place.end()
    with pytest.raises(StoreError):
        place.store().clone(0.1).has(FAILED_KEY)
    place.begin_again()
    place.come(0).result(PATIENCE)
    back.result(PATIENCE)


def test_others_that_never_end_are_an_error(place: Place) -> None:
    place.meet()
    with pytest.raises(BarrierTimeout) as caught:
        place.come(1, leaving=0.1, seconds=0.1).result(PATIENCE)
    assert caught.value.missing == (), "all have come: it is the end of their training that is waited for"
