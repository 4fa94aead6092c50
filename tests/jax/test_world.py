"""How a process finds the service at which JAX's processes meet."""

import socket
import threading

from podscale.jax.world import _wait_for_service


def test_the_service_is_asked_once_it_listens() -> None:
    """A process that asked before would be answered a second later; one that never finds it lets JAX say so."""
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
