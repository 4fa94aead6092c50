"""How the pods of a JAX run come together at the store that the first of them keeps, each time anew.

A meeting begins once every pod has come, and ends with its store. A pod that died and was made again may come while
the others still work in the meeting that it was lost from: it must not join that one, where ranks wait for processes
that are no more. It is known by having come there before.

A pod that comes back does not join the meeting that it was lost from.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from podscale.distributed.store import FAILED_KEY, Store, StoreError, StoreTimeout
from podscale.launch.rendezvous import Rendezvous
from podscale.launch.worker_spec import WorkerSpec
from podscale.util.formatting import format_ranks

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


BARRIER_TIMEOUT_SECONDS = 900.0
"""How long the pods of a job wait for each other, as torchrun does: machines may come up minutes apart."""
RETRY_SECONDS = 0.2
NEVER_SET_KEY = "never"
"""A key that nobody writes: who waits for it waits for the end of the store."""


class BarrierTimeout(Exception):
    """The pods have not come together; `missing` has the numbers of those that did not come."""

    def __init__(self, text: str, missing: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.missing = tuple(missing)


def pod_barrier(
    rendezvous: Rendezvous,
    connect: Callable[[], Store],
    rank: int,
    *,
    exit_grace_seconds: float,
    timeout_seconds: float = BARRIER_TIMEOUT_SECONDS,
) -> None:
    """Returns when every pod has come to a meeting that has not begun without this one. Raises NotGathered.

    connect: a new connection to the meeting place, whichever store is there. rank: the first of this pod.
    exit_grace_seconds: for so long the others, and what is left of this pod's predecessor, may go on, because they may
    be about to save; after that they are told that this rank is lost. timeout_seconds: the longest wait for another
    pod, and for the old meeting's end.
    """
    assert rendezvous.node_rank is not None
    pods = [f"pod/{number}" for number in range(rendezvous.nodes)]
    me = pods[rendezvous.node_rank]
    deadline = time.monotonic() + timeout_seconds
    while True:
        store = connect()
        try:
            if (coming := store.add(f"came/{me}", 1)) > 1 and _is_rendezvous_complete(store, pods):
                _wait_for_store_end(store, rank, exit_grace_seconds, timeout_seconds)
                deadline = time.monotonic() + timeout_seconds
                continue
            store.set(me, str(coming))
            return store.wait(pods, timeout_seconds)
        except StoreTimeout:
            absent = [number for number, pod in enumerate(pods) if not store.has(pod)]
            told = format_ranks(absent).replace("rank", "pod", 1)
            raise BarrierTimeout(
                f"{told} of {rendezvous.nodes} did not come within {timeout_seconds:.0f} s; its own log or its events say why",
                missing=absent,
            ) from None
        except StoreError as error:  # it may have ended in the middle of a question, and the next one be about to begin
            if time.monotonic() >= deadline:
                raise BarrierTimeout(f"the first pod of {rendezvous.nodes} cannot be reached: {error}") from error
            time.sleep(RETRY_SECONDS)


def mark_rank_lost(store: Store, rank: int) -> None:
    """Lets the other ranks know of one that cannot say it itself, unless somebody has failed before."""
    if not store.has(FAILED_KEY):
        store.set(FAILED_KEY, str(rank))


def _is_rendezvous_complete(store: Store, pods: list[str]) -> bool:
    """Whether all have come to this meeting; one that has ended in the meantime is not to be joined either."""
    try:
        return all(map(store.has, pods))
    except StoreError:
        return True


def _wait_for_store_end(store: Store, rank: int, exit_grace_seconds: float, timeout_seconds: float) -> None:
    """Returns when the store has ended, with the meeting that this pod was lost from."""
    try:
        for patience in (exit_grace_seconds, timeout_seconds):
            try:
                store.wait([NEVER_SET_KEY], patience)
            except StoreTimeout:
                mark_rank_lost(store, rank)
    except StoreError:
        return
    raise BarrierTimeout(
        f"the other pods did not end the training that this pod was lost from within {timeout_seconds:.0f} s"
    )
