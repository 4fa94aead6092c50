"""Store of a run: several clients, waits, lost servers."""

import asyncio
import json
import socket
import threading
import time
from unittest.mock import AsyncMock, Mock

import pytest

from podscale.distributed.store import FAILED_KEY, LocalStore, Store, StoreClient, StoreError, StoreServer, StoreTimeout
from tests.support.ports import free_port


@pytest.fixture
def store() -> StoreClient:
    return StoreClient("127.0.0.1", StoreServer("127.0.0.1").port, 20.0)


@pytest.mark.parametrize("kind", ["remote", "own"])
def test_values_are_stored(kind: str, request: pytest.FixtureRequest) -> None:
    store: Store = request.getfixturevalue("store") if kind == "remote" else LocalStore()
    other = store.clone(20.0)
    assert not other.has("a")
    store.set("a", 'x"\n\u00fc')
    store.set("b", "")
    store.set("b", "y" * 100_000)
    assert other.get(["b", "a"]) == ["y" * 100_000, 'x"\n\u00fc']
    assert other.has("a")
    assert [store.add("n", 2), other.add("n", 0), other.add("n", -1)] == [2, 2, 1]
    with pytest.raises(StoreTimeout, match=r"\bc$"):
        other.wait(["a", "c"], 0.05)
    assert other.get(["a"]) == ['x"\n\u00fc'], "a client can be used after a timeout"
    assert not other.has(FAILED_KEY)


def test_a_waiting_client_gets_the_values_once_all_keys_are_set(store: StoreClient) -> None:
    received: list[list[str]] = []
    waiting = [threading.Thread(target=lambda: received.append(store.clone(20.0).get(["a", "b"]))) for _ in range(20)]
    for thread in waiting:
        thread.start()
    store.set("b", "2")
    time.sleep(0.05)
    assert received == []
    store.set("a", "1")
    for thread in waiting:
        thread.join(20)
    assert received == [["1", "2"]] * 20


def test_a_client_waits_for_a_server_that_starts_later() -> None:
    port = free_port()
    received: list[bool] = []
    early = threading.Thread(target=lambda: received.append(StoreClient("127.0.0.1", port, 30.0).has("a")))
    early.start()
    time.sleep(0.3)
    StoreServer("127.0.0.1", port)
    early.join(30)
    assert received == [False]


def test_an_absent_or_stopped_server_is_an_error() -> None:
    with pytest.raises(StoreError) as raised:
        StoreClient("127.0.0.1", free_port(), 0.1).has("a")
    assert isinstance(raised.value.__cause__, ConnectionRefusedError)
    with socket.create_server(("127.0.0.1", 0)) as server_socket:
        store = StoreClient("127.0.0.1", server_socket.getsockname()[1], 20.0)
        threading.Thread(target=lambda: server_socket.accept()[0].close(), daemon=True).start()
        with pytest.raises(StoreError) as raised:
            store.get(["a"])
        assert isinstance(raised.value.__cause__, ConnectionError)
        with pytest.raises(StoreError):  # it stays lost: a late response could be that of an earlier request
            store.has("a")


def test_exit_messages_of_one_world_do_not_reach_the_next() -> None:
    """Pods restart one by one, and the new store has the address of the old one."""
    port = free_port()
    first = StoreServer("127.0.0.1", port)
    store = StoreClient("127.0.0.1", port, 20.0)
    store.set("a", "1")
    first.close()
    second = StoreServer("127.0.0.1", port)
    with pytest.raises(StoreError) as raised:
        store.clone(20.0).set(FAILED_KEY, "1")
    assert type(raised.value.__cause__) is ConnectionError, "not a refused one: there is a store"
    assert not StoreClient("127.0.0.1", second.port, 20.0).has(FAILED_KEY)


def test_a_client_whose_host_is_gone_is_not_waited_for() -> None:
    """The kernel gives up the connection with ETIMEDOUT, which is no ConnectionError."""
    server, writer = StoreServer("127.0.0.1"), Mock(drain=AsyncMock())
    asyncio.run(server._serve(Mock(readline=AsyncMock(side_effect=TimeoutError)), writer))
    assert server._clients == 0
    writer.close.assert_called_once_with()


def test_an_invalid_request_does_not_stop_the_server(store: StoreClient) -> None:
    store.set("a", "1")
    for line in (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", json.dumps({"get": 3}).encode() + b"\n", b"\xff\n"):
        with socket.create_connection(("127.0.0.1", store._port)) as stranger:
            stranger.settimeout(20)
            stranger.sendall(line)
            with stranger.makefile("rb") as response:
                assert len(response.read().splitlines()) == 1, "the store's name, and no response"
    assert store.get(["a"]) == ["1"]


def test_the_server_waits_until_its_clients_disconnect() -> None:
    server = StoreServer("127.0.0.1")
    store = StoreClient("127.0.0.1", server.port, 20.0)
    store.set("a", "1")
    server.wait_for_clients(0.1)
    assert store.get(["a"]) == ["1"]
    store.close()
    before = time.monotonic()
    server.wait_for_clients(60.0)
    assert time.monotonic() - before < 50
