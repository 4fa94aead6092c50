"""A pod that comes back does not join the meeting that it was lost from.

A container that died is started again within seconds. The first node may not have noticed the loss by then: its
torchrun still answers, and whoever joins it is alone in a world that is about to end, until time limits are over. So a
pod that had begun before waits until the meeting place has stopped answering, or has had the time to. (JAX's pods know
an old meeting from a new one: see `gathering`.)

Nor does it take the run directory for somebody else's. A pod that was deleted by force is replaced at once, while its
processes still have their grace time to save; the new one waits for their lease.
"""

import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from podscale.launch.podtask import WorkerSpec

OLD_RENDEZVOUS_SECONDS = 20.0
"""How long the other ranks take at most to notice a loss and end (see attempt.AFTERMATH_SECONDS)."""
REJOIN_POLL_SECONDS = 0.5


def wait_to_rejoin(spec: WorkerSpec, is_stopping: Callable[[], bool], environ: Mapping[str, str] = os.environ) -> None:
    """Returns when this pod may join the others: at once, unless its container has been started again.

    The mark of a first start is in the temporary directory, which in a pod lives as long as the pod, not the container;
    outside of pods there is no such thing, and nothing is done.
    """
    if "KUBERNETES_SERVICE_HOST" not in environ or not spec.rendezvous.node_rank or spec.engine == "jax":
        return
    mark = Path(tempfile.gettempdir()) / f".podscale-{spec.run}-{spec.stage}-began"
    if mark.exists():
        wait_until_unreachable(spec.rendezvous.address, spec.rendezvous.port, is_stopping)
    mark.touch()


def wait_until_unreachable(
    address: str, port: int, is_stopping: Callable[[], bool], timeout_seconds: float = OLD_RENDEZVOUS_SECONDS
) -> None:
    """Returns when nobody answers at that address, after so many seconds, or on a request to stop."""
    deadline = time.monotonic() + timeout_seconds
    while _is_reachable(address, port) and time.monotonic() < deadline and not is_stopping():
        time.sleep(REJOIN_POLL_SECONDS)


def _is_reachable(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=REJOIN_POLL_SECONDS).close()
    except OSError:
        return False
    return True
