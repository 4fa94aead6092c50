"""World of one process: its rank, all devices, and communication with the other processes."""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import jax
from jax.sharding import Mesh

from podscale.distributed.rank_group import RankGroup
from podscale.distributed.store import StoreTimeout
from podscale.distributed.waits import BARRIER, waiting_for
from podscale.distributed.worker_env import RankEnv
from podscale.errors import HangDetected, InputError
from podscale.jax.collective_errors import delay_abort
from podscale.jax.mesh import RANKS, axis_size
from podscale.util import env
from podscale.util.formatting import format_ranks
from podscale.util.processes import call_with_timeout

NO_TIMEOUT_SECONDS = 2**30
"""Timeout of JAX's own heartbeats, seconds: never reached, because `RankHeartbeat` detects and names a lost process."""
COORDINATOR_KEY = "jax/coordinator"
CONNECT_SECONDS, RETRY_SECONDS = 5.0, 0.02
ANSWER_SECONDS = 5.0
"""Extra timeout of the other processes, seconds, so that process 0 times out first: only it knows who is missing."""


@dataclass(frozen=True)
class World:
    """One process of a run. A rank is a process in metrics, logs and outcomes, and a device in the sample order.

    Args:
        devices: devices of all processes, ordered by process and id; every process has the same number.
        processes_per_node: processes on each node, which have consecutive ranks.
        timeout_seconds: timeout of waits for other processes.
    """

    rank: int
    size: int
    devices: tuple[jax.Device, ...]
    local_devices: tuple[jax.Device, ...]
    timeout_seconds: float
    rank_group: RankGroup
    processes_per_node: int = 1
    _calls: Callable[[], int] = field(default_factory=lambda: count().__next__, repr=False, compare=False)

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    @property
    def device_name(self) -> str:
        return str(self.local_devices[0].device_kind)

    @property
    def ranks(self) -> range:
        """Indices of this process's devices: its ranks of the sample order, unless devices share images."""
        count = len(self.local_devices)
        return range(self.rank * count, (self.rank + 1) * count)

    def barrier(self, name: str = "the end of a stage") -> None:
        """Wait until every process has called this. Raises StoreTimeout with the missing ones."""
        self._exchange(name, None)

    def broadcast(self, value: Any = None) -> Any:
        """Return process 0's value on every process; any JSON value."""
        key = f"world/{self._calls()}"
        if self.is_rank0:
            self.rank_group.store.set(key, json.dumps(value))
            return value
        return json.loads(self._wait_for_keys([key], "the value of process 0")[0])

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in order, on every process; any JSON values."""
        return self._exchange("a gathering", value)

    def hosts(self) -> tuple[str, ...]:
        """Return the host name of every process. Every process must call this at the same time."""
        return tuple(self.gather(socket.gethostname()))

    def _exchange(self, name: str, value: Any) -> list[Any]:
        """Gather on process 0, which answers, so that the number of messages is linear in the processes."""
        number, store = self._calls(), self.rank_group.store
        keys = [f"world/{number}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], json.dumps(value))
        if not self.is_rank0:
            answer: list[Any] = json.loads(self._wait_for_keys([f"world/{number}"], name, ANSWER_SECONDS)[0])
            return answer
        values = [json.loads(text) for text in self._wait_for_keys(keys, name)]
        store.set(f"world/{number}", json.dumps(values))
        return values

    @waiting_for(BARRIER)
    def _wait_for_keys(self, keys: list[str], name: str, extra_seconds: float = 0.0) -> list[str]:
        store = self.rank_group.store
        try:
            store.wait(keys, self.timeout_seconds + extra_seconds)
        except StoreTimeout as error:
            missing = [rank for rank, key in enumerate(keys) if not store.has(key)]  # of a single key: process 0
            raise StoreTimeout(f"timed out: {format_ranks(missing)} did not reach {name}") from error
        return store.get(keys)


def loader_ranks(world: World, mesh: Mesh) -> range:
    """Return the ranks of the sample order that this process reads: its devices, or its groups that share images."""
    local_ranks = axis_size(mesh, RANKS) // world.size
    return range(world.rank * local_ranks, (world.rank + 1) * local_ranks)


def join_world(
    rank_group: RankGroup, environ: Mapping[str, str] = os.environ, *, gpus: Sequence[int] | None = None
) -> World:
    """Join JAX's rendezvous and look up all devices. Raises HangDetected if a process does not join in time.

    Args:
        gpus: numbers of this process's GPUs among the visible ones; None: all devices are this process's.
    """
    rank_env = RankEnv.read(environ)
    if threads := env.read_number(env.OMP_NUM_THREADS, environ):
        os.environ.setdefault("NPROC", str(threads))  # XLA's name for its threads on a CPU
    if rank_env.world_size > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM away from our StopRequest
        delay_abort()
        _join_jax(rank_group, rank_env, gpus)
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    local = tuple(device for device in devices if device.process_index == rank_env.rank)
    _check_slice(rank_env, local)
    return World(
        rank_env.rank,
        rank_env.world_size,
        tuple(devices),
        local,
        rank_group.timeout_seconds,
        rank_group,
        rank_env.local_world_size,
    )


def leave_world(world: World) -> None:
    """Leave the rank group. Does not shut down `jax.distributed`, which would abort a process whose peer is late."""
    world.rank_group.leave()


def _join_jax(rank_group: RankGroup, rank_env: RankEnv, gpus: Sequence[int] | None) -> None:
    """Join on another thread, because JAX aborts the waiting thread by SIGABRT at its own timeout."""
    seconds = rank_group.timeout_seconds
    try:
        call_with_timeout(seconds, lambda: _initialize(rank_group, rank_env, gpus))
    except TimeoutError as error:
        raise HangDetected(
            "not every process joined JAX's rendezvous", field="launch.timeout_seconds", got=seconds
        ) from error


def _initialize(rank_group: RankGroup, rank_env: RankEnv, gpus: Sequence[int] | None) -> None:
    """Join JAX's own rendezvous. Process 0 runs its service at a free port and the address of the store."""
    if rank_env.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            rank_group.store.set(COORDINATOR_KEY, f"{rank_env.store_address}:{probe.getsockname()[1]}")
    coordinator = rank_group.store_for_thread(rank_group.timeout_seconds).get([COORDINATOR_KEY])[0]
    if rank_env.rank > 0:
        _wait_for_service(coordinator, rank_group.timeout_seconds)
    jax.distributed.initialize(
        coordinator,
        rank_env.world_size,
        rank_env.rank,
        cluster_detection_method="deactivate",
        local_device_ids=gpus,
        initialization_timeout=round(rank_group.timeout_seconds),
        heartbeat_timeout_seconds=NO_TIMEOUT_SECONDS,
    )


def _wait_for_service(address: str, seconds: float) -> None:
    """Wait until the service listens, because a JAX client that connects too early retries only after a second."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    while time.monotonic() < end:  # after that JAX reports the error
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS):
            return
        time.sleep(RETRY_SECONDS)


def _check_slice(rank_env: RankEnv, local_devices: tuple[jax.Device, ...]) -> None:
    """Check that GKE's slice variables reached libtpu; without them each slice would train alone."""
    index = getattr(local_devices[0], "slice_index", None) or 0
    if local_devices[0].platform == "tpu" and rank_env.slice_count > 1 and index != rank_env.slice_id:
        raise InputError(
            f"this pod is in slice {rank_env.slice_id} of {rank_env.slice_count}, but its TPUs are in slice {index}: "
            "MEGASCALE_SLICE_ID and MEGASCALE_NUM_SLICES, which GKE sets in the pods of a JobSet, did not reach it",
            field="MEGASCALE_SLICE_ID",
            got=index,
        )
