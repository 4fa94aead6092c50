"""What a rank finds in its environment: its place among the others, from `launch.spawner`.

How the pods of a JAXJob, a TrainJob, a JobSet or a TPU slice meet is read before, in each pod: see `launch.rendezvous`.
Nothing is left for JAX's own detection to guess, which knows some of these launchers and fails in others.

What the supervisor hands to each rank, of whichever engine.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from podscale.config import RunConfig
from podscale.distributed.worker_exit import WorkerReport, report_and_exit
from podscale.errors import InputError, PodscaleError
from podscale.runs import RunDirectory
from podscale.runs.lease import lease_fence
from podscale.util import env, processes

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class RankEnv:
    """Process `rank` of `size`, `local_rank` of `local_size` in its pod, in slice `slice_` of `slices`.

    address, store_port: of the store by which they meet; empty and 0 for a process alone.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    store_address: str = ""
    store_port: int = 0
    slice_id: int = 0
    slice_count: int = 1


def read_rank_env(environ: Mapping[str, str] = os.environ) -> RankEnv:
    """The place that the spawner gave to this process; alone where there is none.

    Raises InputError for variables that are half set or make no sense together.
    """
    if environ.get("WORLD_SIZE", "1") == "1" and env.STORE not in environ:
        return RankEnv()
    missing = [name for name in (*RANK_VARIABLES, env.STORE) if not environ.get(name)]
    if (env.SLICE in environ) != (env.SLICES in environ) and env.SLICES in environ:
        missing.append(env.SLICE)
    if missing:
        raise InputError(
            f"incomplete rank environment: {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} missing",
            field=missing[0],
            hint="`podscale train` starts ranks with all of it.",
        )
    rank, size, local_rank, local_size = (env.number(name, environ[name]) for name in RANK_VARIABLES)
    address, _, port = environ[env.STORE].rpartition(":")
    slice_, slices = 0, 1
    if env.SLICES in environ:
        slice_, slices = env.number(env.SLICE, environ[env.SLICE]), env.number(env.SLICES, environ[env.SLICES])
    seat = RankEnv(rank, size, local_rank, local_size, address, env.number(env.STORE, port), slice_, slices)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size and 0 <= slice_ < slices):
        raise InputError(f"the numbers of this rank contradict each other: {seat}", field="RANK", got=rank)
    return seat


def launch_age(environment: Mapping[str, str] = os.environ) -> float:
    """Return the seconds since this launch began: with the pod, or with the process if torchrun restarted it."""
    began = env.read_seconds(env.LIFE_BEGAN, environment)
    again = environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return processes.process_age() if began is None or again else max(0.0, time.monotonic() - began)


@dataclass(frozen=True)
class WorkerEnv:
    """One rank's part of a stage.

    config: the resolved document. stage: `train` or `evaluate`. shard_set: its location. rank_directory: local to the
    pod; metrics-<rank>.prom and outcome-<rank>.json go there. fence_number: number of the supervisor's lease, if it has
    one.
    """

    config: RunConfig
    stage: str
    shard_set: str
    rank_directory: Path
    fence_number: int | None
    rank: int

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> "WorkerEnv":
        """Read what the supervisor passes to a worker (docs/environment.md), and RANK."""
        return cls(
            config=RunConfig.model_validate_json(environ[env.CONFIG]),
            stage=environ[env.STAGE],
            shard_set=environ[env.SHARD_SET],
            rank_directory=Path(environ[env.RANK_DIR]),
            fence_number=env.read_number(env.FENCE, environ),
            rank=int(environ.get("RANK", "0")),
        )

    def exit(self, error: PodscaleError) -> NoReturn:
        """Ends this process because of `error`, from whichever thread finds it."""
        report_and_exit(self.rank_directory, self.rank, WorkerReport(int(error.exit_code), str(error)))

    def fence(self, run: RunDirectory) -> Callable[[], None] | None:
        """Raises where a newer launch writes the run directory; None without a lease."""
        return None if self.fence_number is None else lease_fence(run.lease, self.fence_number)
