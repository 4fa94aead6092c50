"""Wait for the service of JAX's rendezvous."""

import socket
import threading

from podscale.jax.world import _wait_for_service


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
