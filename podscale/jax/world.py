"""World of one process: its rank, all devices, and communication with the other processes."""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import jax

from podscale.distributed.rank_group import RankGroup
from podscale.distributed.store import StoreTimeout
from podscale.distributed.waits import BARRIER, waiting_for
from podscale.distributed.worker_env import RankEnv
from podscale.errors import HangDetected, InputError
from podscale.jax.collective_errors import delay_abort
from podscale.util.formatting import format_ranks
from podscale.util.processes import call_with_timeout

NO_TIMEOUT_SECONDS = 2**30
"""Seconds after which JAX itself would find a process missing: the pulse does, and says who and where."""
COORDINATOR_KEY = "jax/coordinator"
CONNECT_SECONDS, RETRY_SECONDS = 5.0, 0.02
ANSWER_SECONDS = 5.0
"""So much longer the others wait for process 0 than it waits for them: it alone knows who has not come."""


@dataclass(frozen=True)
class World:
    """One process of a run. A rank of metrics, logs and outcomes is a process, one of the sample order a device.

    devices: of all processes, in the order of processes and of their ids; local_devices: of this one, as many as of
    each. timeout_seconds: the longest wait for the others.
    """

    rank: int
    size: int
    devices: tuple[jax.Device, ...]
    local_devices: tuple[jax.Device, ...]
    timeout_seconds: float
    rank_group: RankGroup
    """Where all processes are, or this one alone."""
    _calls: Callable[[], int] = field(default_factory=lambda: count().__next__, repr=False, compare=False)

    @property
    def is_rank0(self) -> bool:
        """Process 0: the one that writes."""
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """What this process computes on, for people."""
        return str(self.local_devices[0].device_kind)

    @property
    def ranks(self) -> range:
        """This process's devices, counted over all: its ranks of the sample order, unless devices share images."""
        each = len(self.local_devices)
        return range(self.rank * each, (self.rank + 1) * each)

    def barrier(self, name: str = "the end of a stage") -> None:
        """Returns when every process has come here; raises HangDetected with those that have not."""
        self._exchange(name, None)

    def broadcast(self, value: Any = None) -> Any:
        """What process 0 gave here, on every process; anything that JSON can hold."""
        key = f"world/{self._calls()}"
        if self.is_rank0:
            self.rank_group.store.set(key, json.dumps(value))
            return value
        return json.loads(self._wait_for_keys([key], "what process 0 has to say")[0])

    def gather(self, value: Any) -> list[Any]:
        """What every process gave here, by process, on every process; anything that JSON can hold."""
        return self._exchange("a gathering", value)

    def hosts(self) -> tuple[str, ...]:
        """The machine of every process, by name. Every process must call this at the same time."""
        return tuple(self.gather(socket.gethostname()))

    def _exchange(self, name: str, value: Any) -> list[Any]:
        """Process 0 collects and answers: as many messages as processes, not their square."""
        number, store = self._calls(), self.rank_group.store
        keys = [f"world/{number}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], json.dumps(value))
        if not self.is_rank0:
            found: list[Any] = json.loads(self._wait_for_keys([f"world/{number}"], name, ANSWER_SECONDS)[0])
            return found
        found = [json.loads(text) for text in self._wait_for_keys(keys, name)]
        store.set(f"world/{number}", json.dumps(found))
        return found

    @waiting_for(BARRIER)
    def _wait_for_keys(self, keys: list[str], name: str, more: float = 0.0) -> list[str]:
        store = self.rank_group.store
        try:
            store.wait(keys, self.timeout_seconds + more)
        except StoreTimeout as error:
            waited = [rank for rank, key in enumerate(keys) if not store.has(key)]  # of one key: for process 0
            raise StoreTimeout(f"timed out: {format_ranks(waited)} did not come to {name}") from error
        return store.get(keys)


def join_world(rank_group: RankGroup, environ: Mapping[str, str] = os.environ) -> World:
    """Joins the other processes, which have all come to the meeting, and finds the devices of all.

    Raises HangDetected where one of them is lost now.
    """
    seat = RankEnv.read(environ)
    if threads := environ.get("OMP_NUM_THREADS"):
        os.environ.setdefault("NPROC", threads)  # XLA's name for its threads on a CPU
    if seat.world_size > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM away from our StopRequest
        delay_abort()
        _join_jax(rank_group, seat)
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mine = tuple(device for device in devices if device.process_index == seat.rank)
    _check_slice(seat, mine)
    return World(seat.rank, seat.world_size, tuple(devices), mine, rank_group.timeout_seconds, rank_group)


def single_process_world() -> World:
    """A world of this process and its devices."""
    return join_world(RankGroup.join(RankEnv(), timeout_seconds=0.0), {})


def leave_world(world: World) -> None:
    """Lets the others know that this process is done; process 0 stays for the last of them.

    JAX's own farewell is left out: it ends a process whose peer does not say it in time.
    """
    world.rank_group.leave()


def _join_jax(rank_group: RankGroup, rank_env: RankEnv) -> None:
    """On a thread of its own, because JAX ends the one by SIGABRT in which it waits in vain."""
    seconds = rank_group.timeout_seconds
    try:
        call_with_timeout(seconds, lambda: _initialize(rank_group, rank_env))
    except TimeoutError as error:
        raise HangDetected(
            "JAX's processes did not find each other", field="launch.timeout_seconds", got=seconds
        ) from error


def _initialize(rank_group: RankGroup, rank_env: RankEnv) -> None:
    """JAX's own rank_group: its service is process 0's, where others find this pod, at a port that is free there."""
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
        local_device_ids=[rank_env.local_rank] if rank_env.local_world_size > 1 else None,
        initialization_timeout=round(rank_group.timeout_seconds),
        heartbeat_timeout_seconds=NO_TIMEOUT_SECONDS,
    )


def _wait_for_service(address: str, seconds: float) -> None:
    """Returns once something listens there: a process that asks JAX too early asks again only after a second."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    while time.monotonic() < end:  # then JAX says what is wrong
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS):
            return
        time.sleep(RETRY_SECONDS)


def _check_slice(rank_env: RankEnv, mine: tuple[jax.Device, ...]) -> None:
    """The TPU library counts slices by variables of its own; where they are missing, each slice trains by itself."""
    found = getattr(mine[0], "slice_index", None) or 0
    if mine[0].platform == "tpu" and rank_env.slice_count > 1 and found != rank_env.slice_id:
        raise InputError(
            f"this pod is in slice {rank_env.slice_id} of {rank_env.slice_count}, but its TPUs are in slice {found}: "
            "MEGASCALE_SLICE_ID and MEGASCALE_NUM_SLICES, which GKE sets in the pods of a JobSet, did not reach it",
            field="MEGASCALE_SLICE_ID",
            got=found,
        )
