"""Rendezvous of JAX's processes: the wait for its service, and the GPUs that a process is given."""

import socket
import threading
from unittest import mock

import jax
import pytest

from podscale.distributed.rank_group import RankGroup
from podscale.distributed.store import LocalStore
from podscale.distributed.worker_env import RankEnv
from podscale.jax.world import _initialize, _wait_for_service


def test_a_process_connects_once_the_service_listens() -> None:
    """A process that connected earlier would retry after a second. After the timeout, JAX reports the error."""
    with socket.socket() as service:
        service.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{service.getsockname()[1]}"
        _wait_for_service(address, seconds=0.05)
        waiting = threading.Thread(target=_wait_for_service, args=(address, 60.0))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        service.listen()
        waiting.join(30.0)
        assert not waiting.is_alive()


@pytest.mark.parametrize("gpus", [[0], [3], None])
def test_jax_gets_the_gpus_of_the_process(gpus: list[int] | None) -> None:
    rank_group = RankGroup(0, 4, LocalStore(), 60.0)
    with mock.patch.object(jax.distributed, "initialize") as initialize:
        _initialize(rank_group, RankEnv(0, 4, 0, 4, "127.0.0.1", 1), gpus)
    assert initialize.call_args.kwargs["local_device_ids"] == gpus
