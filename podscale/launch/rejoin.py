"""Join a rendezvous with the other pods, also after a restart of this pod.

A failed pod restarts within seconds, while the other pods may still run in the old rendezvous. The new pod must not
join the old rendezvous, because its ranks would wait for processes that are gone. With PyTorch (torchrun) it waits
until the old rendezvous stops answering (`wait_to_rejoin`). With JAX the pods join at the store of the first pod, which
is a new store for each launch (`pod_barrier`). If a restarted pod finds that all pods, itself included, have joined
this store, the store is the old one: the pod marks its rank as lost, so that the others exit, and waits until the store
ends.

The new pod also waits for the run directory's lease, because the processes of a pod deleted by force may still save.
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
"""Maximal wait for the other ranks to detect the loss and exit, seconds (see `worker_group.SURVIVOR_GRACE_SECONDS`)."""
REJOIN_POLL_SECONDS = 0.5
BARRIER_TIMEOUT_SECONDS = 900.0
"""Timeout of the pods' barrier, seconds, the same as torchrun's. Nodes may start minutes apart."""
RETRY_SECONDS = 0.2
"""Time between attempts to reach the store, seconds."""
NEVER_SET_KEY = "never"
"""Key that no pod sets, so a wait for it lasts until the store ends."""


def wait_to_rejoin(spec: WorkerSpec, is_stopping: Callable[[], bool], environ: Mapping[str, str] = os.environ) -> None:
    """Wait until this pod may join the others, if its container was restarted.

    In a pod, the temporary directory outlives the container. A file there marks the first start. Pod 0 hosts the
    rendezvous and never waits.
    """
    if "KUBERNETES_SERVICE_HOST" not in environ or not spec.rendezvous.node_rank or spec.config.train.engine == "jax":
        return
    start_file = Path(tempfile.gettempdir()) / f".podscale-{spec.config.run.id}-{spec.stage}-began"
    if start_file.exists():
        wait_until_unreachable(spec.rendezvous.address, spec.rendezvous.port, is_stopping)
    start_file.touch()


def wait_until_unreachable(
    address: str, port: int, is_stopping: Callable[[], bool], timeout_seconds: float = OLD_RENDEZVOUS_SECONDS
) -> None:
    """Wait until the address does not answer, for at most `timeout_seconds` or until a stop is requested."""
    deadline = time.monotonic() + timeout_seconds
    while _is_reachable(address, port) and time.monotonic() < deadline and not is_stopping():
        time.sleep(REJOIN_POLL_SECONDS)


def _is_reachable(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=REJOIN_POLL_SECONDS).close()
    except OSError:
        return False
    return True


class BarrierTimeout(Exception):
    """The pods did not all join in time. `missing` has the numbers of the absent ones, if known."""

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
    """Join the rendezvous and wait until every pod has. A restarted pod waits until the old rendezvous has ended.

    Args:
        connect: Opens a new connection to the store that answers now, old or new.
        rank: First rank of this pod.
        exit_grace_seconds: Time for the ranks of the old rendezvous to save and exit by themselves. After it, this pod
            marks its rank as lost in the old store.
        timeout_seconds: Timeout for the other pods, and for the end of the old rendezvous.

    Raises:
        BarrierTimeout: A pod did not join, or the old rendezvous did not end.
    """
    assert rendezvous.node_rank is not None
    pods = [f"pod/{number}" for number in range(rendezvous.nodes)]
    pod = pods[rendezvous.node_rank]
    deadline = time.monotonic() + timeout_seconds
    while True:
        store = connect()
        try:
            if (joins := store.add(f"came/{pod}", 1)) > 1 and _is_rendezvous_complete(store, pods):
                _wait_for_store_end(store, rank, exit_grace_seconds, timeout_seconds)
                deadline = time.monotonic() + timeout_seconds
                continue
            store.set(pod, str(joins))
            return store.wait(pods, timeout_seconds)
        except StoreTimeout:
            absent = [number for number, key in enumerate(pods) if not store.has(key)]
            absent_pods = format_ranks(absent).replace("rank", "pod", 1)
            raise BarrierTimeout(
                f"{absent_pods} of {rendezvous.nodes} did not join within {timeout_seconds:.0f} s; see their logs",
                missing=absent,
            ) from None
        except StoreError as error:  # the old store ended during a request, and the new one has not started
            if time.monotonic() >= deadline:
                raise BarrierTimeout(f"the first pod of {rendezvous.nodes} cannot be reached: {error}") from error
            time.sleep(RETRY_SECONDS)


def mark_rank_lost(store: Store, rank: int) -> None:
    """Mark a rank as failed in the store, unless another rank is already marked."""
    if not store.has(FAILED_KEY):
        store.set(FAILED_KEY, str(rank))


def _is_rendezvous_complete(store: Store, pods: list[str]) -> bool:
    """Return True if all pods have joined, or if the store has ended; in both cases this pod cannot join any more."""
    try:
        return all(map(store.has, pods))
    except StoreError:
        return True


def _wait_for_store_end(store: Store, rank: int, exit_grace_seconds: float, timeout_seconds: float) -> None:
    """Wait for the end of the old rendezvous' store; mark this rank as lost after the grace period."""
    try:
        for wait_seconds in (exit_grace_seconds, timeout_seconds):
            try:
                store.wait([NEVER_SET_KEY], wait_seconds)
            except StoreTimeout:
                mark_rank_lost(store, rank)
    except StoreError:
        return
    raise BarrierTimeout(
        f"the old rendezvous, from before this pod restarted, did not end within {timeout_seconds:.0f} s"
    )
