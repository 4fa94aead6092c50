"""A pod that cannot meet the others says what it waits for, until it has met them."""

import socket
import threading

import pytest

from podscale.launch import rendezvous
from podscale.launch.rendezvous import Rendezvous
from tests.support.polling import until


def meeting(address: str, port: int = 1, nodes: int = 2, node_rank: int | None = 1) -> Rendezvous:
    return Rendezvous(nodes=nodes, node_rank=node_rank, address=address, port=port)


def test_a_name_that_does_not_resolve() -> None:
    said = rendezvous.describe_missing_pods(meeting("digits-worker-0.invalid"))
    assert "digits-worker-0.invalid" in said
    assert "headless service" in said


def test_nobody_answers() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # taken, and not listening
        port = bound.getsockname()[1]
        said = rendezvous.describe_missing_pods(meeting("127.0.0.1", port))
    assert f"127.0.0.1:{port}" in said
    assert "network policy" in said


@pytest.mark.parametrize(("nodes", "others"), [(2, "the other pod"), (5, "the other 4 pods")])
def test_others_are_missing(nodes: int, others: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = rendezvous.describe_missing_pods(meeting("127.0.0.1", port, nodes))
    assert said == f"waiting for {others} of this job; the first pod answers at 127.0.0.1:{port}"
    assert (
        rendezvous.describe_missing_pods(meeting("0.invalid", nodes=nodes, node_rank=0))
        == f"waiting for {others} of this job"
    )


def test_it_is_said_again_until_they_have_met() -> None:
    said: list[str] = []
    met = threading.Event()
    with rendezvous.log_rendezvous_progress(
        meeting("0.invalid", node_rank=0), met.is_set, said.append, first_seconds=0.01, every_seconds=0.01
    ):
        until(lambda: len(said) >= 3)
        met.set()
        until(lambda: not alive())
    assert set(said) == {rendezvous.describe_missing_pods(meeting("0.invalid", node_rank=0))}


def test_a_pod_on_its_own_waits_for_nobody() -> None:
    with rendezvous.log_rendezvous_progress(Rendezvous(), lambda: False, pytest.fail, first_seconds=0, every_seconds=0):
        assert not alive()


def alive() -> bool:
    return any(thread.name == "joining" for thread in threading.enumerate())
